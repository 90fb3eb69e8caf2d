"""SAPO (search): a KL pull on good tokens that the policy is forgetting."""

import jax
import jax.numpy as jnp

from losses.baselines.grpo import grpo_loss
from losses.catalogue import paper
from losses.ops.divergences import kl_estimate
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import BOUND, log_ratio, token_ratio


@paper(
    "sapo-search",
    kind="objective",
    base="grpo",
    title="Improving Search Agent with One Line of Code (SAPO, Search Agent Policy Optimization)",
    arxiv="2603.10069",
    year=2026,
    metric="penalised_fraction",
)
def sapo_search_loss(
    logprobs, old_logprobs, mask, advantages, *, clip_low=0.2, clip_high=0.2, beta=0.1, tau=0.8
):
    """GRPO's clipped loss plus a KL to the old policy on positive tokens whose ratio has fallen.

        c    = stop_grad [ A > 0 and r < tau ],   d = clip(old_logprobs - logprobs, -20, 20)
        x    = - min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) + beta c (exp(d) - d - 1)
        loss = mean_b (1/|m_b|) sum_t m x

    The penalty's gradient beta (1 - exp(d)) grows as r -> 0, where the surrogate's vanishes. r is
    the token ratio, log-ratio clamped to +-20.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T]; mask excludes retrieved text.
      clip_low, clip_high: the ratio's window.
      beta: weight of the penalty.
      tau: the penalty acts below this ratio (strictly).

    Returns:
      (loss, metrics).

    Reference: arXiv 2603.10069, after the abstract and summaries; estimator, beta, tau and the
    penalty's normaliser are assumed.
    """
    loss, metrics = grpo_loss(
        logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, beta=0.0
    )
    ratio = jax.lax.stop_gradient(token_ratio(logprobs, old_logprobs, mask))
    good = advantages > 0
    falling = (good & (ratio < tau)).astype(mask.dtype)
    d = jnp.clip(log_ratio(logprobs, old_logprobs, mask), -BOUND, BOUND)
    penalty = falling * kl_estimate(d, "k3")
    forgotten = (good & (ratio < 0.5)).astype(mask.dtype)
    drift = {
        "penalised_fraction": masked_mean(falling, mask),
        "positive_ratio_mean": masked_mean(ratio, mask * good),
        "forgotten_fraction": masked_mean(forgotten, mask * good),
    }
    return loss + beta * aggregate(penalty, mask, "sequence_mean"), {**drift, **metrics}
