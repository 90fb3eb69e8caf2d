"""ReBN: discounted returns of turns, normalised over all turns of the batch."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import standardise
from losses.ops.returns import reward_to_go
from losses.ops.turns import to_tokens, turn_mask


@paper(
    "gem-rebn",
    kind="advantage",
    title="GEM: A Gym for Agentic LLMs",
    arxiv="2510.01051",
    year=2025,
    stages={"objective": "dr_grpo_loss"},
)
def rebn_advantage(turn_rewards, turn_ids, mask, *, gamma=1.0, normalize=True, eps=1e-9):
    """Return of the token's turn, a standard score among the batch's turns, [B,T].

        G_bk = turn_rewards_bk + gamma G_b,k+1                 over all columns
        Z    = (G - mean) / (std + eps)                        population, every valid turn once
        A_bt = m_bt Z_b,turn(t)

    A turn is valid if it has a valid token; the reward of one that is not still flows into the
    returns before it. One valid turn, or equal returns: exactly 0. No groups: one rollout per task
    is enough.

    Args:
      turn_rewards: [B,K].
      turn_ids: [B,T] int.
      mask: [B,T].
      gamma: discount per turn; 0.9 for games.
      normalize: False gives plain returns (REINFORCE).
      eps: added to the standard deviation.

    Returns:
      advantages [B,T], constant.

    Reference: Liu et al. 2025, arXiv 2510.01051. Population statistics, as in one of the three
    trainers released with it.
    """
    value = reward_to_go(turn_rewards, jnp.ones_like(turn_rewards), gamma)
    if normalize:
        valid = turn_mask(turn_ids, mask, turn_rewards.shape[1])
        value = standardise(value, valid, ddof=0, eps=eps)
    return to_tokens(value, turn_ids, mask)
