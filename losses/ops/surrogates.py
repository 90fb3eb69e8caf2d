"""Clipped surrogates: which side of a ratio loses its gradient, and at which sign."""

import jax
import jax.numpy as jnp

from losses.ops.masked import masked_max, masked_mean, rows_to_tokens
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio


def clip_ratio(ratio, clip_low, clip_high):
    """Clips a ratio to [1 - clip_low, 1 + clip_high]; a bound that is None is absent."""
    low = -jnp.inf if clip_low is None else 1 - clip_low
    high = jnp.inf if clip_high is None else 1 + clip_high
    return jnp.clip(ratio, low, high)


def clipped_side(ratio, advantages, clip_low, clip_high):
    """Boolean: the clipped branch is active, A > 0 and r > 1 + high, or A < 0 and r < 1 - low."""
    high = jnp.inf if clip_high is None else 1 + clip_high
    low = -jnp.inf if clip_low is None else 1 - clip_low
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


def clipped_surrogate(ratio, advantages, clip_low, clip_high):
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), to be maximised.

    The gradient is A dr where the unclipped term is the smaller one or both agree, else exactly
    zero; written as a choice so that ties do not split it.
    """
    held = jax.lax.stop_gradient(clip_ratio(ratio, clip_low, clip_high))
    clipped = clipped_side(ratio, advantages, clip_low, clip_high)
    return jnp.where(clipped, held, ratio) * advantages


def dual_clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip):
    """The clipped surrogate with a floor of dual_clip A where A < 0 (None: no floor)."""
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is None:
        return surrogate
    floored = (advantages < 0) & (surrogate < dual_clip * advantages)
    return jnp.where(floored, dual_clip * advantages, surrogate)


def ratio_metrics(logprobs, old_logprobs, mask):
    """Logged scalars of the step's drift: approx_kl (k1 of KL(old || new)), ratio_max.

    approx_kl is the mean of old_logprobs - logprobs over the valid tokens, nats per token.
    """
    d = jax.lax.stop_gradient(log_ratio(logprobs, old_logprobs, mask))
    return {
        "approx_kl": -masked_mean(d, mask),
        "ratio_max": jnp.exp(jnp.minimum(masked_max(d, mask), 20.0)),
    }


def clip_metrics(ratio, advantages, mask, clip_low, clip_high):
    """Logged share of valid tokens whose clipped branch is active."""
    clipped = clipped_side(jax.lax.stop_gradient(ratio), advantages, clip_low, clip_high)
    clipped = jnp.broadcast_to(clipped, mask.shape).astype(mask.dtype)
    return {"clip_fraction": masked_mean(clipped, mask)}


def clipped_token_mean(
    logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None
):
    """(loss, metrics) of the clipped surrogate over the mask's tokens, for advantages [B].

        loss = - sum_it m_it min( r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i ) / sum m

    with the floor of `dual_clip` where A < 0. Log-ratios are held only where exp would overflow.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    advantages = rows_to_tokens(advantages, mask)
    term = dual_clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)
    metrics = {
        "advantage_abs": masked_mean(jnp.abs(advantages), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return -masked_mean(term, mask), metrics
