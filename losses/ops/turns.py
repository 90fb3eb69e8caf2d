"""Sums and look-ups by segment (turn or step) within each response.

Segments are given by `turn_ids` [B,T] int and read only where mask is 1. K, the number of segments
in an array [B,K], is static: the size of a given array, or an argument.
"""

import jax
import jax.numpy as jnp

from losses.ops.masked import select


def membership(turn_ids, mask, num_turns):
    """[B,T,K] float: token t is a valid token of turn k."""
    return jax.nn.one_hot(turn_ids, num_turns, dtype=mask.dtype) * (mask > 0)[..., None]


def turn_sum(x, turn_ids, mask, num_turns):
    """Sum of x over the valid tokens of each turn: [B,T] -> [B,K]."""
    members = membership(turn_ids, mask, num_turns)
    return jnp.sum(select(x, mask)[..., None] * members, axis=1)


def turn_count(turn_ids, mask, num_turns):
    """Number of valid tokens of each turn, [B,K]; 0 for turns that a row does not have."""
    return jnp.sum(membership(turn_ids, mask, num_turns), axis=1)


def turn_mean(x, turn_ids, mask, num_turns):
    """Mean of x over the valid tokens of each turn, [B,K]; 0 for absent turns."""
    n = turn_count(turn_ids, mask, num_turns)
    return turn_sum(x, turn_ids, mask, num_turns) / jnp.maximum(n, 1)


def turn_mask(turn_ids, mask, num_turns):
    """[B,K] float: 1 for turns in which the row has a valid token."""
    return (turn_count(turn_ids, mask, num_turns) > 0).astype(mask.dtype)


def to_tokens(per_turn, turn_ids, mask):
    """Repeats a value per turn over the turn's valid tokens: [B,K] -> [B,T], 0 where masked."""
    index = jnp.clip(turn_ids, 0, per_turn.shape[1] - 1)
    return select(jnp.take_along_axis(per_turn, index, axis=1), mask)


def last_of_turn(turn_ids, mask):
    """[B,T] float: 1 on the last valid token of each turn."""
    length = mask.shape[1]
    at = jnp.arange(length)
    later = at[None, None, :] > at[None, :, None]
    same = turn_ids[:, :, None] == turn_ids[:, None, :]
    followed = jnp.any(later & same & (mask > 0)[:, None, :], axis=-1)
    return ((mask > 0) & ~followed).astype(mask.dtype)


def same_turn(turn_ids, mask):
    """[B,T,T] boolean: both tokens are valid and of the same turn, adjacent or not."""
    valid = mask > 0
    same = turn_ids[:, :, None] == turn_ids[:, None, :]
    return same & valid[:, :, None] & valid[:, None, :]


def first_of_turn(turn_ids, mask):
    """[B,T] float: 1 on the first valid token of each turn, whatever the ids are."""
    at = jnp.arange(mask.shape[1])
    preceded = jnp.any(same_turn(turn_ids, mask) & (at[:, None] > at[None, :]), axis=-1)
    return ((mask > 0) & ~preceded).astype(mask.dtype)


def slots(ids, mask):
    """Renumbers the ids of each row's valid tokens to 0, 1, ... in increasing order, [B,T] int.

    Whatever the ids are (gaps, negative, any size), slot k is the row's k-th turn or step that has
    a valid token, so that T slots always suffice. Meaningless where masked.
    """
    big = jnp.iinfo(ids.dtype).max
    order = jnp.argsort(jnp.where(mask > 0, ids, big), axis=1)
    ordered = jnp.take_along_axis(jnp.where(mask > 0, ids, big), order, axis=1)
    changes = jnp.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)))
    numbers = jnp.cumsum(changes, axis=1)
    return jnp.take_along_axis(numbers, jnp.argsort(order, axis=1), axis=1)


def slot_sum(x, slot, mask):
    """Sum of x over the valid tokens of each of a row's T slots, [B,T] -> [B,T]."""
    rows = jnp.arange(mask.shape[0])[:, None]
    return jnp.zeros_like(x).at[rows, slot].add(select(x, mask))


def slot_max(x, slot, mask):
    """Maximum of x over the valid tokens of each of a row's T slots; -inf for an empty one."""
    rows = jnp.arange(mask.shape[0])[:, None]
    return jnp.full_like(x, -jnp.inf).at[rows, slot].max(select(x, mask, -jnp.inf))


def own_turn_mean(x, turn_ids, mask):
    """Mean of x over the valid tokens of each token's own turn, [B,T]; 0 where masked.

    Ids are any integers, adjacent or not; memory grows with T, not with T squared.
    """
    order = jnp.argsort(turn_ids, axis=1)
    ordered = jnp.take_along_axis(turn_ids, order, axis=1)
    new = (ordered[:, 1:] != ordered[:, :-1]).astype(jnp.int32)
    place = jnp.pad(jnp.cumsum(new, axis=1), ((0, 0), (1, 0)))
    rows = jnp.arange(x.shape[0])[:, None]
    turn = jnp.zeros_like(place).at[rows, order].set(place)
    total = jnp.zeros_like(x).at[rows, turn].add(select(x, mask))
    n = jnp.zeros_like(mask).at[rows, turn].add((mask > 0).astype(mask.dtype))
    return select((total / jnp.maximum(n, 1))[rows, turn], mask)
