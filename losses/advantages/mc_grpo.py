"""MC-GRPO: centred on the group's median, with the median rollout left out of the update."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups

_PAPER = {
    "title": "MC-GRPO: Median-Centered Group Relative Policy Optimization for Small-Rollout "
    "Reinforcement Learning",
    "arxiv": "2601.22582",
    "year": 2026,
}


@paper("mc-grpo", kind="selection", companion=True, metric="kept_fraction", **_PAPER)
def mc_grpo_keep(rewards, group_ids):
    """1 for trained responses, 0 for the pivot of each group, [B].

    The pivot is the first response whose reward equals the group's lower median; a group of one is
    its own.

    Args:
      rewards: [B].
      group_ids: [B] int.

    Returns:
      keep [B], constant.
    """
    at_median = rewards == _lower_median(rewards, group_ids)
    pivot = jnp.argmax(groups.same_group(group_ids) & at_median[None, :], axis=1)
    return (pivot != jnp.arange(rewards.shape[0])).astype(rewards.dtype)


@paper("mc-grpo", kind="advantage", base="grpo", stages={"selection": "mc_grpo_keep"}, **_PAPER)
def mc_grpo_advantage(rewards, group_ids, *, eps=1e-3, rebalance=False, max_abs=None):
    """Reward relative to the group's median, over its median absolute deviation, [B].

        A_i = (r_i - med) / (mad + eps),   mad = med of |r - med|

    med is the lower median, r_(ceil(n/2)), never an average of two. Sample one response more than
    are to be trained on: the pivot (`mc_grpo_keep`) is left out of the loss; masked rows still
    count in the denominator of "sequence_mean", a constant factor. 0/1 rewards have mad = 0 in most
    groups and hence advantages of +-1/eps, as in the authors' code.

    Args:
      rewards: [B].
      group_ids: [B] int, groups of an odd size.
      eps: added to the deviation.
      rebalance: multiply a group by its size over the number of its |A| > 1e-6.
      max_abs: bound of |A|, applied last; None: none. An addition of ours.

    Returns:
      advantages [B], constant.

    Reference: arXiv 2601.22582; lotusroot-kim/MC-GRPO. Of tied medians the first is the pivot.
    """
    away = rewards - _lower_median(rewards, group_ids)
    value = away / (_lower_median(jnp.abs(away), group_ids) + eps)
    if rebalance:
        n = groups.group_size(group_ids, dtype=rewards.dtype)
        active = groups.group_sum((jnp.abs(value) > 1e-6).astype(rewards.dtype), group_ids)
        value = value * jnp.where(active > 0, n / jnp.maximum(active, 1), 1.0)
    return value if max_abs is None else jnp.clip(value, -max_abs, max_abs)


def _lower_median(x, group_ids):
    size = jnp.sum(groups.same_group(group_ids), axis=1)
    return groups.order_statistic(x, group_ids, (size - 1) // 2)
