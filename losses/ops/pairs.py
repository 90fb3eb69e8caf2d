"""Preference pairs: by row index [P], or as a table [B,B] of preferred and other rows."""

import jax
import jax.numpy as jnp

from losses.ops.groups import same_group
from losses.ops.masked import masked_mean


def logistic_loss(margin, label_smoothing=0.0):
    """-(1 - label_smoothing) log sigmoid(z) - label_smoothing log sigmoid(-z) of margins z."""
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def sides(rows, chosen, rejected):
    """Values of the pairs' two rows: [B] and indices [P] -> ([P], [P])."""
    return rows[chosen.astype(jnp.int32)], rows[rejected.astype(jnp.int32)]


def pair_table(preferred, group_ids, mask):
    """[B,B] float: row i is preferred, row j is not, of one group, and both have valid tokens."""
    alive = jnp.any(mask > 0, axis=-1)
    first, second = alive & (preferred > 0), alive & (preferred <= 0)
    pairs = same_group(group_ids) & first[:, None] & second[None, :]
    return pairs.astype(mask.dtype)


def table_sides(rows, pairs):
    """Mean of a value per row over the preferred and over the other rows that form a pair."""
    used = jnp.any(pairs > 0, axis=1), jnp.any(pairs > 0, axis=0)
    return tuple(masked_mean(rows, side.astype(pairs.dtype)) for side in used)


def margins(rows):
    """Difference of every two rows, [B] -> [B,B]."""
    return rows[:, None] - rows[None, :]


def mean_over_pairs(x, pairs=None):
    """Mean of a term per pair, [P] or with a table [B,B]; 0 without any pair."""
    return masked_mean(x, jnp.ones_like(x) if pairs is None else pairs)


def margin_metrics(margin, pairs=None):
    """Logged scalars: mean margin, and the share of pairs with a positive one."""
    margin = jax.lax.stop_gradient(margin)
    return {
        "preference_margin": mean_over_pairs(margin, pairs),
        "preference_accuracy": mean_over_pairs((margin > 0).astype(margin.dtype), pairs),
    }


def side_metrics(chosen, rejected):
    """Logged scalars: mean log-probability of the two sides; both often fall together."""
    return {
        "chosen_logprob": jax.lax.stop_gradient(mean_over_pairs(chosen)),
        "rejected_logprob": jax.lax.stop_gradient(mean_over_pairs(rejected)),
    }
