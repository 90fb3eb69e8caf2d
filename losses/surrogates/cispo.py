"""CISPO: clipped importance weights that never drop a token."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clip_ratio, ratio_metrics


@paper(
    "cispo",
    kind="objective",
    title="MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention (CISPO)",
    arxiv="2506.13585",
    year=2025,
    metric="clip_fraction",
)
def cispo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=None, clip_high=4.0):
    """REINFORCE with a truncated, constant importance weight.

        w_it = stop_grad( clip( exp(logprobs_it - old_logprobs_it), 1 - clip_low, 1 + clip_high ) )
        loss = - sum_it m_it w_it A_it logprobs_it / sum_it m_it

    The clip acts alike for both signs of A, so every token keeps a gradient. clip_high is relative:
    4.0 caps the weight at 5 (TRL's and ScaleRL's setting; the paper prints none). The value of the
    loss means nothing.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      clip_low, clip_high: bounds of the weight; None: no bound on that side.

    Returns:
      (loss, metrics).

    Reference: MiniMax 2025, arXiv 2506.13585.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask)
    return weighted_reinforce(ratio, logprobs, old_logprobs, advantages, mask, clip_low, clip_high)


def weighted_reinforce(ratio, logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    """Token mean of -w A log pi with the constant weight w = clip(ratio)."""
    ratio = jax.lax.stop_gradient(ratio)
    weight = clip_ratio(ratio, clip_low, clip_high)
    loss = -masked_mean(weight * advantages * logprobs, mask)
    changed = (weight != ratio).astype(mask.dtype)
    metrics = {
        "clip_fraction": masked_mean(changed, mask),
        "weight_mean": masked_mean(jnp.broadcast_to(weight, mask.shape), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return loss, metrics
