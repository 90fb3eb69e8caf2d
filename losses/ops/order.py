"""Ranks, top-k sets and quantiles over valid positions, with shapes that no value decides.

`axis=-1` treats every row on its own; `axis=None` the whole array at once, in row-major order.
"""

import jax.numpy as jnp

from losses.ops.masked import select

SLACK = 1e-6


def _slack(x):
    """What a product ratio * count may miss a whole number by and still be taken for it."""
    x = jnp.asarray(x, jnp.result_type(x, float))
    return jnp.maximum(SLACK, 2 * jnp.finfo(x.dtype).eps * jnp.abs(x))


def rank(x, mask, axis=-1):
    """Place of each valid position in descending order of x, from 0, int.

    Equal values: the earlier position first. Invalid positions come after all valid ones.
    """
    if axis is None:
        return rank(x.reshape(-1), mask.reshape(-1)).reshape(x.shape)
    order = jnp.lexsort((-select(x, mask), mask <= 0), axis=axis)
    return jnp.argsort(order, axis=axis)


def snapped(position):
    """A position among order statistics; within rounding of a whole number, that number."""
    whole = jnp.round(position)
    return jnp.where(jnp.abs(position - whole) <= _slack(position), whole, position)


def share(ratio, n):
    """ceil(ratio n), where a rounding error above a whole number does not add one."""
    return jnp.ceil(ratio * n - _slack(ratio * n))


def share_down(ratio, n):
    """floor(ratio n), where a rounding error below a whole number does not take one off."""
    return jnp.floor(ratio * n + _slack(ratio * n))


def top(x, mask, count, axis=-1):
    """0/1 array of the `count` valid positions of largest x, or all if there are fewer.

    Equal values: the earlier position first. `count` is a number, or broadcasts to x (values of
    one row alike).
    """
    return ((mask > 0) & (rank(x, mask, axis) < count)).astype(mask.dtype)


def quantile(x, mask, q, axis=-1):
    """Quantile of the valid values, linear between order statistics; keeps the reduced axes.

    Position q (n - 1) in ascending order (0-based). A position within 1e-6 of a whole number is
    that order statistic itself, so that x >= quantile holds for it exactly. 0 where none is valid.
    """
    if axis is None:
        flat = quantile(x.reshape(-1), mask.reshape(-1), q)
        return flat.reshape((1,) * x.ndim)
    ordered = jnp.sort(select(x, mask, jnp.inf), axis=axis)
    n = jnp.sum(mask > 0, axis=axis, keepdims=True)
    last = jnp.maximum(n - 1, 0)
    at = snapped(q * last.astype(x.dtype))
    low = jnp.floor(at).astype(last.dtype)
    below = jnp.take_along_axis(ordered, low, axis=axis)
    above = jnp.take_along_axis(ordered, jnp.minimum(low + 1, last), axis=axis)
    below, above = jnp.where(n > 0, below, 0.0), jnp.where(n > 0, above, 0.0)
    return below + (at - low) * (above - below)
