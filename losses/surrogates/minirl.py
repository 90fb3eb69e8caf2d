"""MiniRL: the first-order surrogate, valid while sampler and old policy stay near."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.groups import centred
from losses.ops.masked import aggregate, masked_mean, rows_to_tokens
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clipped_side, ratio_metrics
from losses.surrogates.tis import tis_credit


@paper(
    "minirl",
    kind="objective",
    title="Stabilizing Reinforcement Learning with LLMs: Formulation and Practices",
    arxiv="2512.01374",
    year=2025,
    metric="kept_fraction",
)
def minirl_loss(
    logprobs,
    old_logprobs,
    sampler_logprobs,
    mask,
    rewards,
    group_ids,
    *,
    clip_low=0.2,
    clip_high=0.27,
    is_cap=5.0,
    length_normalize=False,
):
    """Token weights policy/sampler, a one-sided mask around the old policy, a sum over tokens.

        A_b  = rewards_b - group mean
        k_bt = min( exp(old_logprobs - sampler_logprobs), is_cap )            constant
        M_bt = 0 if A_b > 0 and r_bt > 1 + clip_high, or A_b < 0 and r_bt < 1 - clip_low; else 1
        loss = - mean_b sum_t m M k r A_b,    r = exp(logprobs - old_logprobs)

    Both log-ratios are clamped to +-20. A dropped token adds nothing, not the clipped value. The
    mask looks at r alone. The cap is on k (not on k r), and no standard deviation divides A: both
    assumed.

    Args:
      logprobs, old_logprobs, sampler_logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      clip_low, clip_high: the region of r; None: no bound.
      is_cap: upper bound of k; None: none.
      length_normalize: divide each row by its number of valid tokens (the paper's ablation).

    Returns:
      (loss, metrics).

    Reference: arXiv 2512.01374, at second hand.
    """
    gain = rows_to_tokens(centred(rewards, group_ids), mask)
    weighted = tis_credit(gain, old_logprobs, sampler_logprobs, mask, cap=is_cap)
    ratio = token_ratio(logprobs, old_logprobs, mask)
    dropped = clipped_side(ratio, gain, clip_low, clip_high)
    term = -jnp.where(dropped, 0.0, ratio) * weighted
    weight = tis_credit(jnp.ones_like(mask), old_logprobs, sampler_logprobs, mask, cap=is_cap)
    metrics = {
        "kept_fraction": 1 - masked_mean(dropped.astype(mask.dtype), mask),
        "weight_mean": masked_mean(weight, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return aggregate(term, mask, "sequence_mean" if length_normalize else "sequence_sum"), metrics
