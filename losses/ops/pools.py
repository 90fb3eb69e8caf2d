"""Standard scores over pools of valid tokens: of a response, of a group, of a stage of a group."""

import jax.numpy as jnp

from losses.ops.groups import column_max, column_sum
from losses.ops.masked import select
from losses.ops.turns import membership, to_tokens, turn_count, turn_sum

TOLERANCE = 1e-6
"""Values that spread by no more than this count as equal: no eps may blow up their rounding."""


def standardised(x, mask, pool_ids, *, eps, segment_ids=None, num_segments=1):
    """(x - mean) / (population std + eps) over each token's pool, 0 where masked, [B,T].

    A pool holds the valid tokens of all rows with the same `pool_ids`, or of those only the ones
    with the same `segment_ids`. A single token, or values that spread by no more than `TOLERANCE`:
    0. Values per row go in as [B,1].

    Args:
      x, mask: [B,T].
      pool_ids: [B] int; `jnp.arange(B)` makes every row its own pool.
      eps: added to the standard deviation.
      segment_ids: [B,T] int in [0, num_segments), read where mask is 1.
    """
    x = select(x, mask)
    if segment_ids is None:
        segment_ids = jnp.zeros(mask.shape, jnp.int32)

    def total(values):
        return column_sum(turn_sum(values, segment_ids, mask, num_segments), pool_ids)

    def top(values):
        members = membership(segment_ids, mask, num_segments)
        by_row = jnp.max(jnp.where(members > 0, values[..., None], -jnp.inf), axis=1)
        return column_max(by_row, pool_ids)

    def spread_back(per_segment):
        return to_tokens(per_segment, segment_ids, mask)

    n = jnp.maximum(column_sum(turn_count(segment_ids, mask, num_segments), pool_ids), 1)
    centred = select(x - spread_back(total(x) / n), mask)
    variance = total(centred**2) / n
    flat = top(x) + top(-x) <= TOLERANCE
    std = jnp.where(flat, 0.0, jnp.sqrt(jnp.where(flat, 1.0, variance)))
    equal = spread_back(flat.astype(x.dtype)) > 0
    return jnp.where(equal, 0.0, centred / (spread_back(std) + eps))


def rows_standardised(x, mask, *, eps):
    """Standard scores of each row's valid tokens among themselves, [B,T]."""
    return standardised(x, mask, jnp.arange(mask.shape[0]), eps=eps)


def row_scores(x, valid, pool_ids, *, eps):
    """Standard scores of one value per row among the valid rows of its pool, [B]."""
    return standardised(x[:, None], valid.astype(x.dtype)[:, None], pool_ids, eps=eps)[:, 0]
