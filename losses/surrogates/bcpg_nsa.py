"""BCPG-NSA: behaviour-constrained policy gradient that spares correct steps of wrong responses."""

import jax
import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.groups import centred
from losses.ops.masked import lengths, masked_mean, masked_sum
from losses.ops.ratios import log_ratio, sequence_log_ratio


@paper(
    "bcpg-nsa",
    kind="objective",
    title="Unearthing Gems from Stones: Policy Optimization with Negative Sample Augmentation for "
    "LLM Reasoning",
    arxiv="2505.14403",
    year=2025,
    metric="spared_fraction",
)
def bcpg_nsa_loss(
    logprobs,
    ref_logprobs,
    mask,
    rewards,
    group_ids,
    step_correct: Tokens,
    *,
    beta=0.5,
    tau=1e-3,
    correct_threshold=0.5,
):
    """Offline policy gradient held near the data policy; correct steps of wrong responses spared.

        a_b  = rewards_b - group mean
        w_bt = beta if rewards_b <= correct_threshold and step_correct_bt, else 1
        D_b  = sum_t m (logprobs - ref_logprobs)
        loss = - mean_b (1/|m_b|) [ sum_t m w a_b logprobs - (tau/2) D_b^2 ]

    The behaviour term is the square of the sum, over the length once. All-equal group: a = 0. A
    reward at the threshold is wrong (assumed).

    Args:
      logprobs, ref_logprobs, mask: [B,T]; ref is the policy that generated the data.
      rewards: [B].
      group_ids: [B] int.
      step_correct: [B,T] 1 on tokens of steps that both judges call correct.
      beta: in [-1, 1]; 1 ignores the labels, 0 drops the penalty, below 0 rewards.
      tau: weight of the behaviour term.
      correct_threshold: responses with a larger reward are right.

    Returns:
      (loss, metrics).

    Reference: arXiv 2505.14403, equations 6 and 7 after a reading note.
    """
    gain = centred(rewards, group_ids)
    wrong = (rewards <= correct_threshold)[:, None]
    spared = wrong & (step_correct > 0)
    weight = jnp.where(spared, beta, 1.0).astype(logprobs.dtype)
    drift = sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=False)
    push = gain * masked_sum(weight * logprobs, mask, axis=-1)
    per_row = (push - tau / 2 * drift**2) / jnp.maximum(lengths(mask), 1)
    metrics = {
        "spared_fraction": masked_mean(spared.astype(mask.dtype), mask),
        "weight_mean": masked_mean(weight, mask),
        "kl": masked_mean(jax.lax.stop_gradient(log_ratio(logprobs, ref_logprobs, mask)), mask),
    }
    return -jnp.mean(per_row), metrics
