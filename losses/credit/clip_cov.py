"""Clip-Cov: a few tokens of high covariance are detached from the gradient."""

import jax
import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.masked import count, masked_mean
from losses.ops.order import share_down, top
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import (
    clip_metrics,
    clipped_side,
    clipped_surrogate,
    ratio_metrics,
)


@paper(
    "clip-cov",
    kind="objective",
    base="grpo",
    title="The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models "
    "(Clip-Cov)",
    arxiv="2505.22617",
    year=2025,
    metric="kept_fraction",
)
def clip_cov_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    select_scores: Tokens,
    *,
    ratio_cov=2e-4,
    cov_low=1.0,
    cov_high=5.0,
    clip_low=1.0,
    clip_high=1.0,
):
    """The clipped surrogate without a random few of the tokens that would collapse entropy.

        c_it = (A_it - mean A)(logprobs_it - mean logprobs)         constant; means over the batch
        candidates: valid, not clipped, cov_low < c_it < cov_high
        keep = 0 on the k candidates of smallest select_scores, k = max(floor(ratio_cov N), 1)
        loss = - sum m keep min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) / N

    N is the number of valid tokens, dropped ones included. Equal scores: the earlier position in
    row-major order. The log-ratio is held only where exp would overflow float32.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      select_scores: [B,T] uniform random numbers, drawn afresh by the caller for each update.
      ratio_cov: share of the valid tokens to drop.
      cov_low, cov_high: the band of c; tokens above it count as outliers and stay.
      clip_low, clip_high: the ratio's window is [1 - clip_low, 1 + clip_high].

    Returns:
      (loss, metrics).

    Reference: Cui et al. 2025, arXiv 2505.22617. The authors' code takes the means of c over a
    micro-batch; here they run over what the loss sees.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    covariance = token_covariance(logprobs, advantages, mask)
    free = ~clipped_side(jax.lax.stop_gradient(ratio), advantages, clip_low, clip_high)
    inside = (covariance > cov_low) & (covariance < cov_high)
    candidates = mask * (free & inside)
    dropped = jnp.maximum(share_down(ratio_cov, count(mask)), 1)
    keep = 1 - top(-select_scores, candidates, dropped, axis=None)
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high)
    metrics = {
        "kept_fraction": masked_mean(keep, mask),
        "covariance_mean": masked_mean(covariance, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return masked_mean(keep * term, mask), metrics


def token_covariance(logprobs, advantages, mask):
    """(A - mean A)(logprobs - mean logprobs) over the batch's valid tokens, constant, [B,T]."""
    logprobs = jax.lax.stop_gradient(logprobs)
    away = advantages - masked_mean(advantages, mask)
    return away * (logprobs - masked_mean(logprobs, mask))
