"""DAPO's dynamic sampling: prompts answered all alike are left out."""

from losses.catalogue import paper
from losses.ops.groups import group_max, group_min


@paper(
    "dynamic-sampling",
    kind="selection",
    base="dapo",
    title="DAPO (dynamic sampling)",
    arxiv="2503.14476",
    year=2025,
    metric="kept_fraction",
)
def dynamic_sampling_mask(rewards, group_ids, *, tol=1e-6):
    """Which responses belong to groups with mixed outcomes, [B] of 0 and 1.

        keep_i = 1 if max(rewards of i's group) - min(rewards of i's group) > tol else 0

    Use the verifier's verdict as `rewards`, not a length-shaped reward. A group of one is dropped.
    The trainer keeps sampling prompts until a batch is full of kept groups.

    Args:
      rewards: [B].
      group_ids: [B] int.
      tol: smallest spread that counts.

    Returns:
      keep [B], constant.

    Reference: Yu et al. 2025, arXiv 2503.14476.
    """
    spread = group_max(rewards, group_ids) - group_min(rewards, group_ids)
    return (spread > tol).astype(rewards.dtype)
