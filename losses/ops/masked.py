"""Sums, means and aggregations under a mask.

Masked positions never contribute: they are replaced before any arithmetic (`select`), so that
garbage there, NaN and infinities included, reaches neither a value nor a gradient.
"""

import jax
import jax.numpy as jnp


def select(x, mask, fill=0.0):
    """Returns x where mask is 1 and `fill` elsewhere; the gradient of the rest is zero."""
    return jnp.where(mask > 0, x, jnp.asarray(fill, x.dtype))


def masked_sum(x, mask, axis=None, keepdims=False):
    """Sum of x over the valid positions."""
    return jnp.sum(select(x, mask), axis=axis, keepdims=keepdims)


def count(mask, axis=None, keepdims=False):
    """Number of valid positions, at least 1, so that it can stand in a denominator."""
    return jnp.maximum(jnp.sum(mask > 0, axis=axis, keepdims=keepdims), 1).astype(mask.dtype)


def masked_mean(x, mask, axis=None, keepdims=False):
    """Mean of x over the valid positions; 0 where there is none."""
    return masked_sum(x, mask, axis, keepdims) / count(mask, axis, keepdims)


def masked_var(x, mask, axis=None, ddof=0, keepdims=False):
    """Variance of x over the valid positions with max(n - ddof, 1) in the denominator."""
    centred = x - masked_mean(x, mask, axis, keepdims=True)
    n = count(mask, axis, keepdims)
    return masked_sum(centred**2, mask, axis, keepdims) / jnp.maximum(n - ddof, 1)


def masked_max(x, mask, axis=None, keepdims=False, empty=0.0):
    """Maximum of x over the valid positions; `empty` where there is none."""
    top = jnp.max(select(x, mask, -jnp.inf), axis=axis, keepdims=keepdims)
    return jnp.where(jnp.any(mask > 0, axis=axis, keepdims=keepdims), top, empty)


def masked_min(x, mask, axis=None, keepdims=False, empty=0.0):
    """Minimum of x over the valid positions; `empty` where there is none."""
    return -masked_max(-x, mask, axis, keepdims, -empty)


def whiten(x, mask, *, ddof=1, eps=1e-8, axis=None):
    """Whitens x over its valid positions: m (x - mean) / sqrt(var + eps).

    A single valid position has no variance: its value is returned as it is.
    """
    mean = masked_mean(x, mask, axis, keepdims=True)
    var = masked_var(x, mask, axis, ddof=ddof, keepdims=True)
    alone = jnp.sum(mask > 0, axis=axis, keepdims=True) <= 1
    return select(jnp.where(alone, x, (x - mean) / jnp.sqrt(var + eps)), mask)


def standardise(x, mask, *, ddof=1, eps=1e-8, axis=None):
    """m (x - mean) / (std + eps) over the valid positions; 0 where they are all equal, or one."""
    std = jnp.sqrt(masked_var(x, mask, axis, ddof=ddof, keepdims=True))
    centred = x - masked_mean(x, mask, axis, keepdims=True)
    return select(jnp.where(flat(x, mask, axis), 0.0, centred / (std + eps)), mask)


def flat(x, mask, axis=None):
    """Boolean: all valid positions have the same value (or there is none); keeps the axes.

    Decided by max = min, since a mean that is off by a rounding error would be blown up by the
    small eps of a denominator.
    """
    top = masked_max(x, mask, axis, keepdims=True)
    return top <= masked_min(x, mask, axis, keepdims=True)


def lengths(mask):
    """Number of valid tokens of each row, [B]."""
    return jnp.sum(mask > 0, axis=-1).astype(mask.dtype)


def last_valid(mask):
    """One-hot [B,T] of each row's last valid position; zeros for a row without any."""
    later = jnp.cumsum((mask > 0)[:, ::-1], axis=1)[:, ::-1]
    return ((mask > 0) & (later == 1)).astype(mask.dtype)


def first_valid(mask):
    """One-hot [B,T] of each row's first valid position; zeros for a row without any."""
    return ((mask > 0) & (jnp.cumsum(mask > 0, axis=1) == 1)).astype(mask.dtype)


def next_valid(x, mask, fill=0.0):
    """Value of x at the row's next valid position, `fill` behind the last one, [B,T]."""
    length = mask.shape[-1]
    at = jnp.where(mask > 0, jnp.arange(length), length)
    following = jax.lax.cummin(at, axis=at.ndim - 1, reverse=True)[:, 1:]
    following = jnp.pad(following, ((0, 0), (0, 1)), constant_values=length)
    padded = jnp.pad(x, ((0, 0), (0, 1)), constant_values=fill)
    return jnp.take_along_axis(padded, following, axis=1)


def rows_to_tokens(x, mask):
    """Repeats a value per row over the row's valid tokens: [B] -> [B,T], 0 where masked."""
    return select(jnp.broadcast_to(x[:, None], mask.shape), mask)


AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def aggregate(x, mask, aggregation="token_mean", max_length=None):
    """Reduces a per-token term to a scalar.

        token_mean     sum m x / sum m                       over the batch (DAPO)
        sequence_mean  mean_i ( sum_t m x / sum_t m )        every response alike (GRPO)
        sequence_sum   mean_i sum_t m x                      the response as one action (REINFORCE)
        constant       sum m x / (B max_length)              no dependence on lengths (Dr. GRPO)

    A row without a valid token adds 0 and, wherever rows are counted, stays in the count. Without
    any valid token the result is 0.

    Args:
      x: [B,T] the term.
      mask: [B,T].
      aggregation: one of the four names.
      max_length: the run's generation limit in tokens; read, and required, by "constant" only.

    Raises:
      ValueError: unknown aggregation, or "constant" without `max_length`.
    """
    if aggregation == "token_mean":
        return masked_mean(x, mask)
    if aggregation == "sequence_mean":
        return jnp.mean(masked_mean(x, mask, axis=-1))
    if aggregation == "sequence_sum":
        return jnp.mean(masked_sum(x, mask, axis=-1))
    if aggregation == "constant":
        if max_length is None:
            raise ValueError("aggregation='constant' needs max_length, the generation limit.")
        return masked_sum(x, mask) / (x.shape[0] * max_length)
    raise ValueError(f"Unknown aggregation {aggregation!r}; one of {', '.join(AGGREGATIONS)}.")
