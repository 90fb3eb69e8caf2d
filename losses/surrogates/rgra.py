"""RGRA: GRPO without ratio and clip."""

import jax.numpy as jnp

from losses.baselines.reinforce import reinforce_loss
from losses.catalogue import paper
from losses.ops import groups
from losses.ops.divergences import kl_estimate
from losses.ops.masked import aggregate, masked_mean, rows_to_tokens
from losses.ops.ratios import WIDE_BOUND, log_ratio


@paper(
    "rgra",
    kind="objective",
    title="Are complicated loss functions necessary for teaching LLMs to reason?",
    arxiv="2603.18756",
    year=2026,
    metric="kl",
)
def rgra_loss(
    logprobs,
    ref_logprobs,
    mask,
    rewards,
    group_ids,
    *,
    beta=0.04,
    eps=1e-4,
    scale=True,
    positive_only=False,
    raw_reward=False,
):
    """The group-normalised advantage times log pi, plus a KL term to the reference.

        A_b  = (rewards_b - group mean) / (group std + eps)          std with n - 1
        k3   = exp(d) - d - 1,   d = ref_logprobs - logprobs
        loss = mean_b (1/|m_b|) sum_t m ( -A_b logprobs + beta k3 )

    For one update per batch of samples. Group of one or equal rewards: A = 0. Fully masked rows add
    0 and count in B.

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      beta: weight of the KL.
      eps: added to the standard deviation.
      scale: False drops the division.
      positive_only: ablation, max(A, 0) for A.
      raw_reward: ablation, the reward for A.

    Returns:
      (loss, metrics).

    Reference: arXiv 2603.18756, after published reviews; beta, the estimator and the std convention
    are GRPO's.
    """
    if raw_reward:
        gain = rewards
    elif scale:
        gain = groups.standardised(rewards, group_ids, eps=eps)
    else:
        gain = groups.centred(rewards, group_ids)
    gain = jnp.maximum(gain, 0.0) if positive_only else gain
    policy, metrics = reinforce_loss(
        logprobs, rows_to_tokens(gain, mask), mask, aggregation="sequence_mean"
    )
    # Held only where float32 would overflow.
    d = jnp.clip(log_ratio(logprobs, ref_logprobs, mask), -WIDE_BOUND, WIDE_BOUND)
    k3 = kl_estimate(d, "k3")
    loss = policy + beta * aggregate(k3, mask, "sequence_mean")
    return loss, {"kl": masked_mean(k3, mask), **metrics}
