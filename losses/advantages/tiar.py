"""TIAR: an abstention is worth what the other attempts at the question say."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups


@paper(
    "tiar",
    kind="advantage",
    base="grpo",
    title="TIAR: Trajectory-Informed Advantage Reweighting for LLM Abstention Learning",
    arxiv="2605.25850",
    year=2026,
    stages={"objective": ("grpo_loss", {"beta": 0.001})},
)
def tiar_advantage(rewards, group_ids, *, lam=0.3):
    """GRPO's advantage, moved for abstentions by the difficulty of the question, [B].

        A_i = (r_i - mean) / (std + 1e-6)                       std unbiased; ternary rewards
        A_i <- A_i + lam (1 - 2 right / (right + wrong))        where r_i = 0

    right and wrong count the group's rewards of +1 and -1, exactly; none of either: no change. The
    move is not normalised again. A group of one: r / (1 + 1e-6).

    Args:
      rewards: [B] 1 right, 0 abstained, -1 wrong.
      group_ids: [B] int.
      lam: size of the move.

    Returns:
      advantages [B], constant.

    Reference: arXiv 2605.25850; muyupan/TruthRL, whose config has lam = 0.3 and whose fallback 1.
    """
    right = groups.group_sum((rewards == 1).astype(rewards.dtype), group_ids)
    attempts = right + groups.group_sum((rewards == -1).astype(rewards.dtype), group_ids)
    move = jnp.where(attempts > 0, lam * (1 - 2 * right / jnp.maximum(attempts, 1)), 0.0)
    return groups.standardised_or_raw(rewards, group_ids) + jnp.where(rewards == 0, move, 0.0)
