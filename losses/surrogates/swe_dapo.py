"""DAPO for multi-turn software agents: a penalty on turns, dead groups left out."""

import jax.numpy as jnp

from losses.baselines.dapo import dapo_loss
from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_mean, rows_to_tokens

MARGIN = 1e-6
"""A spread of shaped rewards up to this is rounding."""


@paper(
    "swe-dapo",
    kind="objective",
    title="Training Long-Context, Multi-Turn Software Engineering Agents with Reinforcement "
    "Learning",
    arxiv="2508.03501",
    year=2025,
    metric="kept_fraction",
)
def swe_dapo_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    group_ids,
    turn_ids,
    *,
    clip_low=0.2,
    clip_high=0.28,
    turn_threshold=20,
    max_turns=40,
    eps=1e-6,
):
    """DAPO on outcome rewards less a penalty for long episodes, over the groups that differ.

        K_b = 1 + largest turn id of the row's valid tokens           (0 if it has none)
        R_b = rewards_b - clip( (K_b - turn_threshold) / (max_turns - turn_threshold), 0, 1 )
        A_b = (R_b - group mean) / (group std + eps)                  std with n - 1
        loss = - sum live m min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) / sum live m

    live: max R - min R > 1e-6 in the group; rows of other groups leave the denominator too. No live
    token: 0.

    Args:
      logprobs, old_logprobs, mask: [B,T]; mask is 0 on environment output.
      rewards: [B] outcome of the episode.
      group_ids: [B] int.
      turn_ids: [B,T] int from 0.
      clip_low, clip_high: the ratio's window.
      turn_threshold, max_turns: the penalty grows from 0 at the one to 1 at the other.
      eps: added to the standard deviation.

    Returns:
      (loss, metrics).

    Raises:
      ValueError: max_turns is not larger than turn_threshold.

    Reference: arXiv 2508.03501, built from the abstract: the numbers, and dropping groups by their
    shaped reward, are assumed.
    """
    if max_turns <= turn_threshold:
        raise ValueError(
            f"max_turns must exceed turn_threshold; got {max_turns} and {turn_threshold}."
        )
    turns = jnp.max(jnp.where(mask > 0, turn_ids, -1), axis=-1).astype(rewards.dtype) + 1
    penalty = jnp.clip((turns - turn_threshold) / (max_turns - turn_threshold), 0, 1)
    shaped = rewards - penalty
    live = ~groups.all_equal(shaped, group_ids, tolerance=MARGIN)
    live_mask = mask * live[:, None]
    gain = rows_to_tokens(groups.standardised(shaped, group_ids, eps=eps), live_mask)
    loss, metrics = dapo_loss(
        logprobs, old_logprobs, gain, live_mask, clip_low=clip_low, clip_high=clip_high
    )
    present = (turns > 0).astype(mask.dtype)
    logged = {
        "kept_fraction": jnp.mean(live.astype(mask.dtype)),
        "turns_mean": masked_mean(turns, present),
        "turn_penalty": masked_mean(penalty, present),
    }
    return loss, {**logged, **metrics}
