"""GTR-Turbo: thoughts guided by a merge of the agent's own earlier checkpoints."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from losses.arrays import Tokens, Turns
from losses.catalogue import paper
from losses.ops.masked import select, standardise
from losses.ops.order import top
from losses.ops.ratios import log_ratio
from losses.ops.returns import generalised_advantages
from losses.ops.turns import to_tokens, turn_mean


@paper(
    "gtr-turbo",
    kind="advantage",
    base="ppo",
    title="GTR-Turbo: Merged Checkpoint is Secretly a Free Teacher for Agentic VLM Training",
    arxiv="2512.13043",
    year=2025,
    stages={"objective": "ppo_loss"},
)
def gtr_turbo_advantage(
    turn_rewards,
    turn_values: Turns,
    turn_mask: Turns,
    format_valid: Turns,
    old_logprobs,
    teacher_logprobs,
    thought_mask: Tokens,
    mask,
    turn_ids,
    *,
    gamma=0.9,
    lam=0.95,
    kl_cap=10.0,
    valid_bonus=3.0,
    invalid_penalty=2.0,
    invalid_kl=100.0,
    eps=1e-5,
):
    """Turn-level GAE with a thought penalty to the merged teacher, whitened over turns, [B,T].

        kl_k  = mean over thought tokens of clip( old_logprobs - teacher_logprobs, 0, kl_cap )
                invalid_kl where the turn did not parse
        f_k   = valid_bonus, or -invalid_penalty where it did not
        a_k   = gae_k + f_k - kl_k
        A_k   = (a_k - mean a) / (std a + eps)        over all turns that took place, std with n - 1
        value = A of the token's turn

    The clip acts before the mean: a token that the teacher likes better counts 0. f and kl enter
    after the recursion and are not discounted into earlier turns. No bootstrap behind the last
    turn. A valid turn without thought tokens has kl = 0; fewer than two turns, or equal ones: 0.

    Args:
      turn_rewards: [B,K].
      turn_values: [B,K] critic at the start of each turn.
      turn_mask: [B,K] 1 for turns that took place, a prefix of each row.
      format_valid: [B,K] 1 if the turn parsed into thought and action.
      old_logprobs, teacher_logprobs: [B,T].
      thought_mask: [B,T] 1 on thought tokens.
      mask, turn_ids: [B,T].
      gamma, lam: discount and trace decay between turns (assumed).
      kl_cap, valid_bonus, invalid_penalty, invalid_kl: of the penalty.
      eps: added to the standard deviation.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2512.13043, KL variant as released.
    """
    num_turns = turn_mask.shape[1]
    gap = jnp.clip(log_ratio(old_logprobs, teacher_logprobs, mask), 0, kl_cap)
    kl = turn_mean(gap, turn_ids, mask * (thought_mask > 0), num_turns)
    valid = format_valid > 0
    shaped = jnp.where(valid, valid_bonus - kl, -invalid_penalty - invalid_kl)
    gae = generalised_advantages(turn_rewards, turn_values, turn_mask, gamma, lam)
    per_turn = standardise(select(gae + shaped, turn_mask), turn_mask, ddof=1, eps=eps)
    return to_tokens(per_turn, turn_ids, mask)


def ties_merge(deltas: Sequence[Any], weights: Sequence[float], *, density: float = 0.8) -> Any:
    """TIES merge of checkpoints, given as their differences from the base weights.

    Of every difference the max(1, floor(density n)) largest magnitudes of each tensor are kept
    (equal ones: the lower flat index first). Per entry the sign of the weighted sum is elected, and
    the result is the weighted mean of the entries that have this sign; 0 where there is none.

    Args:
      deltas: one pytree of arrays per checkpoint, all of one structure.
      weights: one number per checkpoint.
      density: share of entries kept, in (0, 1].

    Returns:
      The merged difference, a pytree of the same structure.

    Raises:
      ValueError: as many weights as checkpoints are needed, and at least one.

    Reference: Yadav et al. 2023, arXiv 2306.01708.
    """
    if len(deltas) != len(weights) or not len(deltas):
        raise ValueError(
            f"ties_merge needs one weight per checkpoint; got {len(deltas)} checkpoints and "
            f"{len(weights)} weights."
        )

    def trimmed(x):
        kept = max(1, int(density * x.size + 1e-6))
        magnitudes = jnp.abs(x).reshape(-1)
        return jnp.where(top(magnitudes, jnp.ones_like(magnitudes), kept).reshape(x.shape), x, 0)

    def merged(*tensors):
        stack = jnp.stack([trimmed(jnp.asarray(x)) for x in tensors])
        w = jnp.reshape(jnp.asarray(weights, stack.dtype), (-1,) + (1,) * tensors[0].ndim)
        elected = jnp.sign(jnp.sum(w * stack, axis=0))
        agreeing = w * ((jnp.sign(stack) == elected) & (elected != 0))
        total = jnp.sum(agreeing, axis=0)
        return jnp.sum(agreeing * stack, axis=0) / jnp.where(total == 0, 1, total)

    return jax.tree.map(merged, *deltas)
