"""IcePop: tokens weighted by trainer/sampler inside a band, removed outside it."""

import jax.numpy as jnp

from losses.baselines.grpo import grpo_loss
from losses.catalogue import paper
from losses.ops.masked import masked_max, masked_mean
from losses.ops.ratios import BOUND, log_ratio
from losses.surrogates.mis import mis_credit


@paper(
    "icepop",
    kind="objective",
    base="grpo",
    title="Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model "
    "(Ring-1T)",
    arxiv="2510.18855",
    year=2025,
    metric="removed_fraction",
)
def icepop_loss(
    logprobs,
    old_logprobs,
    sampler_logprobs,
    mask,
    advantages,
    *,
    k_low=0.5,
    k_high=5.0,
    clip_low=0.2,
    clip_high=0.28,
    aggregation="sequence_mean",
):
    """GRPO's clipped loss, each token times the trainer/sampler ratio, or 0 outside a band.

        k = exp(clip(old_logprobs - sampler_logprobs, -20, 20))
        M = k if k_low <= k <= k_high else 0
        x = - M min( r A, clip(r, 1 - clip_low, 1 + clip_high) A )
        loss = mean_b (1/|m_b|) sum_t m x

    k is taken at the old weights and constant. Removed tokens stay in the denominator. Since the
    surrogate is positively homogeneous in A, this is `grpo_loss` on the advantages of `mis_credit`.

    Args:
      logprobs, old_logprobs, sampler_logprobs, mask, advantages: [B,T].
      k_low, k_high: inclusive bounds of k; None: no bound on that side.
      clip_low, clip_high: the ratio's window.
      aggregation: "sequence_mean", or "token_mean".

    Returns:
      (loss, metrics).

    Reference: arXiv 2510.18855; OpenRLHF and TRL (whose default band is [0.5, 2]). The paper's own
    aggregation and clip range were not confirmed.
    """
    weighted = mis_credit(advantages, old_logprobs, sampler_logprobs, mask, low=k_low, high=k_high)
    loss, metrics = grpo_loss(
        logprobs,
        old_logprobs,
        weighted,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        beta=0.0,
        aggregation=aggregation,
    )
    log_k = jnp.clip(log_ratio(old_logprobs, sampler_logprobs, mask), -BOUND, BOUND)
    ones = jnp.ones_like(mask)
    kept = mis_credit(
        ones, old_logprobs, sampler_logprobs, mask, low=k_low, high=k_high, weighted=False
    )
    gap = jnp.abs(jnp.exp(old_logprobs) - jnp.exp(sampler_logprobs))
    mismatch = {
        "removed_fraction": masked_mean(1 - kept, mask),
        "mismatch_abs": masked_mean(jnp.abs(log_k), mask),
        "mismatch_max": masked_max(jnp.abs(log_k), mask),
        "mismatch_probability": masked_mean(gap, mask),
    }
    return loss, {**mismatch, **metrics}
