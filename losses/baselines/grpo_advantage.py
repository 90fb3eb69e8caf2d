"""The group-relative advantage."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups


@paper(
    "grpo-advantage",
    kind="advantage",
    base="grpo",
    title="DeepSeekMath (group-relative advantage)",
    arxiv="2402.03300",
    year=2024,
)
def grpo_advantage(rewards, group_ids, *, scale="group", eps=1e-6):
    """Reward relative to the mean, and the spread, of the responses to the same prompt, [B].

        scale="group"   (r_i - mean_g) / (std_g + eps)          std unbiased
        scale="none"     r_i - mean_g                           (Dr. GRPO)
        scale="batch"   (r_i - mean_g) / (std_batch + eps)

    A group of one and a group of equal rewards give exactly 0 (verl keeps the raw reward of a
    group of one).

    Args:
      rewards: [B].
      group_ids: [B] int, unsorted, groups of any size.
      scale: "group", "none" or "batch".
      eps: added to the standard deviation.

    Returns:
      advantages [B], constant.

    Raises:
      ValueError: unknown scale.

    Reference: Shao et al. 2024, arXiv 2402.03300.
    """
    if scale == "group":
        value = groups.standardised(rewards, group_ids, eps=eps)
    elif scale == "none":
        value = groups.centred(rewards, group_ids)
    elif scale == "batch":
        batch = jnp.zeros_like(group_ids)
        std = groups.group_std(rewards, batch)
        value = groups.centred(rewards, group_ids) / (std + eps)
    else:
        raise ValueError(f"Unknown scale {scale!r}; one of group, none, batch.")
    return value
