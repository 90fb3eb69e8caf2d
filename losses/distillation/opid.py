"""OPID: the shift caused by hindsight skills, added to the outcome advantage."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import select
from losses.ops.ratios import log_ratio
from losses.ops.turns import first_of_turn


def counted_advantage(rewards, group_ids, counts, *, scale_by_std=True, eps=1e-6):
    """Group advantage in which response i stands for counts_i equal samples, [B].

        mu = sum c r / n,   sd = sqrt( sum c (r - mu)^2 / (n - 1) ),   A = (r - mu) / (sd + eps)

    n = sum c over the group; mu = 0 and sd = 1 where n <= 1. Equal rewards: exactly 0.
    """
    n = groups.group_sum(counts, group_ids)
    mean = groups.group_sum(counts * rewards, group_ids) / jnp.maximum(n, 1)
    alone = n <= 1
    equal = groups.all_equal(rewards, group_ids, counts)
    centred = jnp.where(alone, rewards, jnp.where(equal, 0.0, rewards - mean))
    if not scale_by_std:
        return centred
    members = groups.same_group(group_ids, counts)
    squares = counts[None, :] * (rewards[None, :] - mean[:, None]) ** 2
    variance = jnp.sum(jnp.where(members, squares, 0.0), axis=1) / jnp.maximum(n - 1, 1)
    std = jnp.where(alone, 1.0, jnp.sqrt(variance))
    return centred / (std + eps)


@paper(
    "opid",
    kind="advantage",
    base="ppo",
    title="OPID: On-Policy Skill Distillation for Agentic Reinforcement Learning",
    arxiv="2606.26790",
    year=2026,
    stages={"regularizers": [("kl_penalty", {"kl_coef": 0.01})]},
)
def opid_advantage(
    rewards,
    group_ids,
    old_logprobs,
    episode_teacher_logprobs: Tokens,
    step_teacher_logprobs: Tokens,
    episode_mask: Tokens,
    step_mask: Tokens,
    mask,
    turn_ids,
    *,
    w_episode=0.001,
    w_step=0.001,
    clip=None,
    eps=1e-6,
    weight_by_turns=True,
    scale_by_std=True,
):
    """Group advantage counted by turns, plus small terms for what the skills would have changed.

        A_i = (r_i - mu) / (sd + eps)        statistics of the group, a response counted once a turn
        De  = clip(episode_teacher_logprobs - old_logprobs, -clip, clip) episode_mask;  Ds likewise
        out = A_i + w_episode De + w_step Ds

    mu = 0 and sd = 1 in a group of a single turn: A = r / (1 + eps). Equal rewards: A = 0, and the
    skill terms remain.

    Args:
      rewards, group_ids: [B].
      old_logprobs, mask: [B,T].
      episode_teacher_logprobs, step_teacher_logprobs: [B,T] of the same tokens under the old policy
        with the episode skill, or the turn's step skill, in its prompt.
      episode_mask, step_mask: [B,T] 1 on tokens of turns scored with that skill.
      turn_ids: [B,T] int.
      w_episode, w_step: weights.
      clip: bound on the shifts, nats; None: none.
      eps: added to the standard deviation.
      weight_by_turns: count a response once per turn that has a valid token, else once.
      scale_by_std: divide by the standard deviation.

    Returns:
      advantages [B,T].

    Reference: arXiv 2606.26790 and its launch script (the repository's note says mean only).
    """
    if weight_by_turns:
        counts = jnp.sum(first_of_turn(turn_ids, mask), axis=1)
    else:
        counts = jnp.ones_like(rewards)
    out = counted_advantage(rewards, group_ids, counts, scale_by_std=scale_by_std, eps=eps)[:, None]
    for weight, skilled, where in (
        (w_episode, episode_teacher_logprobs, episode_mask),
        (w_step, step_teacher_logprobs, step_mask),
    ):
        where = select(where, mask)
        shift = log_ratio(skilled, old_logprobs, where)
        if clip is not None:
            shift = jnp.clip(shift, -clip, clip)
        out = out + weight * shift * where
    return select(out, mask)
