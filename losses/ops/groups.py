"""Statistics per group of responses, free of loops over groups.

Every function takes values [B] and `group_ids` [B] (arbitrary integers, unsorted, groups of any
size) and returns a value per response: its group's. All of them go through one [B,B] comparison
of the ids, so shapes never depend on values. `valid` [B] leaves responses out of the statistics.
"""

import jax
import jax.numpy as jnp

from losses.ops.order import snapped


def same_group(group_ids, valid=None):
    """[B,B] boolean: j is a (valid) member of i's group."""
    same = group_ids[:, None] == group_ids[None, :]
    return same if valid is None else same & (valid > 0)[None, :]


def group_sum(x, group_ids, valid=None):
    """Sum over the group, [B]."""
    return jnp.sum(jnp.where(same_group(group_ids, valid), x[None, :], 0), axis=1)


def group_size(group_ids, valid=None, dtype=jnp.float32):
    """Number of (valid) members of the group, [B]."""
    return jnp.sum(same_group(group_ids, valid), axis=1).astype(dtype)


def group_mean(x, group_ids, valid=None):
    """Mean over the group, [B]; 0 where no member is valid."""
    n = group_size(group_ids, valid, x.dtype)
    return group_sum(x, group_ids, valid) / jnp.maximum(n, 1)


def group_max(x, group_ids, valid=None):
    """Maximum over the group, [B]; -inf where no member is valid."""
    return jnp.max(jnp.where(same_group(group_ids, valid), x[None, :], -jnp.inf), axis=1)


def group_min(x, group_ids, valid=None):
    """Minimum over the group, [B]; +inf where no member is valid."""
    return jnp.min(jnp.where(same_group(group_ids, valid), x[None, :], jnp.inf), axis=1)


def all_equal(x, group_ids, valid=None, tolerance=0.0):
    """[B] boolean: all (valid) members of the group have the same value, within `tolerance`.

    Decided by max = min, since a mean that is off by a rounding error would be blown up by the
    small eps of a denominator.
    """
    return group_max(x, group_ids, valid) <= group_min(x, group_ids, valid) + tolerance


def group_std(x, group_ids, ddof=1, valid=None):
    """Standard deviation over the group with max(n - ddof, 1) in the denominator, [B].

    Exactly 0 for groups whose members are all equal.
    """
    centred = jnp.where(
        same_group(group_ids, valid), x[None, :] - group_mean(x, group_ids, valid)[:, None], 0
    )
    n = group_size(group_ids, valid, x.dtype)
    var = jnp.sum(centred**2, axis=1) / jnp.maximum(n - ddof, 1)
    equal = all_equal(x, group_ids, valid)
    return jnp.where(equal, 0.0, jnp.sqrt(jnp.where(equal, 1.0, var)))


def centred(x, group_ids, valid=None):
    """x minus its group's mean, exactly 0 in groups whose members are all equal, [B]."""
    difference = x - group_mean(x, group_ids, valid)
    return jnp.where(all_equal(x, group_ids, valid), 0.0, difference)


def standardised(x, group_ids, *, eps=1e-6, ddof=1, valid=None):
    """(x - mean) / (std + eps) within the group, [B]; 0 where all members are equal."""
    std = group_std(x, group_ids, ddof, valid)
    return centred(x, group_ids, valid) / (std + eps)


def standardised_or_raw(x, group_ids, *, eps=1e-6):
    """As `standardised`, but a group of one keeps its value as x / (1 + eps), [B].

    The convention of verl: mean 0 and standard deviation 1 for a group of one.
    """
    alone = group_size(group_ids) == 1
    return jnp.where(alone, x / (1 + eps), standardised(x, group_ids, eps=eps))


def leave_one_out_mean(x, group_ids, valid=None):
    """Mean of the other (valid) members of the group, [B]; 0 where there is none."""
    others = same_group(group_ids, valid) & ~jnp.eye(x.shape[0], dtype=bool)
    n = jnp.sum(others, axis=1).astype(x.dtype)
    return jnp.sum(jnp.where(others, x[None, :], 0), axis=1) / jnp.maximum(n, 1)


def group_rank(x, group_ids, valid=None):
    """Number of (valid) members of the group with a strictly smaller value, [B]."""
    smaller = same_group(group_ids, valid) & (x[None, :] < x[:, None])
    return jnp.sum(smaller, axis=1).astype(x.dtype)


def group_quantile(x, group_ids, quantile, valid=None):
    """Quantile of the group with linear interpolation between order statistics, [B].

    The numpy/torch default: position q (n - 1) in the sorted members. A position within rounding
    of a whole number is that order statistic itself. 0 where no member is valid.
    """
    members = same_group(group_ids, valid)
    ordered = jnp.sort(jnp.where(members, x[None, :], jnp.inf), axis=1)
    n = jnp.sum(members, axis=1)
    at = snapped(quantile * jnp.maximum(n - 1, 0).astype(x.dtype))
    low = jnp.floor(at).astype(jnp.int32)
    high = jnp.minimum(low + 1, jnp.maximum(n - 1, 0))
    below = jnp.take_along_axis(ordered, low[:, None], axis=1)[:, 0]
    above = jnp.take_along_axis(ordered, high[:, None], axis=1)[:, 0]
    empty = n == 0
    below, above = jnp.where(empty, 0.0, below), jnp.where(empty, 0.0, above)
    return below + (at - low) * (above - below)


def order_statistic(x, group_ids, index):
    """The member of the group at place `index` [B] int, from 0, in ascending order, [B]."""
    ordered = jnp.sort(jnp.where(same_group(group_ids), x[None, :], jnp.inf), axis=1)
    return jnp.take_along_axis(ordered, index[:, None], axis=1)[:, 0]


def group_median(x, group_ids, valid=None):
    """Median of the group, the mean of the two middle members where n is even, [B]."""
    return group_quantile(x, group_ids, 0.5, valid)


def group_index(group_ids):
    """Renumbers arbitrary ids to 0..B-1 (the row of the group's first member), [B] int."""
    return jnp.argmax(same_group(group_ids), axis=1)


def first_in_group(group_ids):
    """[B] boolean: the response is the first of its group in the batch."""
    return group_index(group_ids) == jnp.arange(group_ids.shape[0])


def number_of_groups(group_ids, dtype=jnp.float32):
    """Number of distinct groups in the batch, a scalar."""
    return jnp.sum(first_in_group(group_ids)).astype(dtype)


def column_sum(x, group_ids):
    """Sum over the group in each column, [B,K] -> [B,K]; as one product, full precision."""
    same = same_group(group_ids).astype(x.dtype)
    return jnp.matmul(same, x, precision="highest")


def column_max(x, group_ids):
    """Maximum over the group in each column, [B,K] -> [B,K]."""
    return jnp.max(jnp.where(same_group(group_ids)[:, :, None], x[None], -jnp.inf), axis=1)


def group_logsumexp(x, group_ids, valid=None):
    """log of the sum of exp(x) over the (valid) members of the group, [B].

    0, without a gradient, where no member is valid.
    """
    members = same_group(group_ids, valid)
    some = jnp.any(members, axis=1)
    terms = jnp.where(members, x[None, :], -jnp.inf)
    terms = jnp.where(some[:, None], terms, 0.0)
    return jnp.where(some, jax.nn.logsumexp(terms, axis=1), 0.0)
