"""Balanced aggregation: token means of positives and of negatives apart."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean, masked_sum
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics

MARGIN = 1e-6
"""Advantages this near to 0 belong to neither sign: a group mean is off by its rounding."""


def balanced_aggregate(x, mask, advantages, group_ids):
    """Mean over groups of (|P|/n) T(P) + (|N|/n) T(N), T the token mean of x over a set of rows.

    P and N hold the group's rows of positive and of negative mean advantage; n counts all its rows.

    Args:
      x, mask, advantages: [B,T].
      group_ids: [B] int.

    Returns:
      a scalar.
    """
    side = masked_mean(advantages, mask, axis=-1)
    tokens = lengths(mask)
    n = groups.group_size(group_ids, dtype=mask.dtype)
    weight = jnp.zeros_like(side)
    for member in (side > MARGIN, side < -MARGIN):
        rows = groups.group_size(group_ids, member, mask.dtype)
        total = groups.group_sum(tokens, group_ids, member)
        weight = jnp.where(member, rows / (n * jnp.maximum(total, 1)), weight)
    number = groups.number_of_groups(group_ids, mask.dtype)
    return jnp.sum(weight * masked_sum(x, mask, axis=-1)) / number


@paper(
    "balanced-aggregation",
    kind="objective",
    base="grpo",
    title="Balanced Aggregation: Understanding and Fixing Aggregation Bias in GRPO",
    arxiv="2605.04077",
    year=2026,
    metric="length_gap",
)
def balanced_aggregation_loss(
    logprobs, old_logprobs, mask, advantages, group_ids, *, clip_low=0.2, clip_high=0.28
):
    """The clipped surrogate, averaged by sign within each group.

        x_bt   = - min( r A, clip(r, 1 - clip_low, 1 + clip_high) A )
        loss_g = (|P_g|/n_g) T(P_g) + (|N_g|/n_g) T(N_g),   T(S) = sum_{b in S} sum_t m x / sum m
        loss   = mean_g loss_g

    P_g, N_g: rows of mean advantage above 1e-6, below -1e-6; other rows add no tokens and count in
    n_g. Groups without signal count in the mean over groups.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      group_ids: [B] int.
      clip_low, clip_high: the ratio's window.

    Returns:
      (loss, metrics); metrics hold the coefficient of variation of the lengths in a group and the
      mean length of positives minus that of negatives, which decide how the classical rules fail.

    Reference: arXiv 2605.04077, after published summaries; the weights' normaliser n_g (rather than
    the number of signed rows) is assumed.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask)
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high)
    tokens = lengths(mask)
    mean = groups.group_mean(tokens, group_ids)
    variation = groups.group_std(tokens, group_ids, ddof=0) / jnp.maximum(mean, 1)
    side = masked_mean(advantages, mask, axis=-1)
    positive, negative = ((s > MARGIN).astype(mask.dtype) for s in (side, -side))
    metrics = {
        "length_variation": jnp.mean(variation),
        "length_gap": masked_mean(tokens, positive) - masked_mean(tokens, negative),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return balanced_aggregate(term, mask, advantages, group_ids), metrics
