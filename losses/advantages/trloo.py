"""TRLOO: leave-one-out returns of turns, against the same turn of the other trajectories."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.groups import column_max, column_sum
from losses.ops.returns import reward_to_go
from losses.ops.turns import to_tokens, turn_mask


@paper(
    "trloo",
    kind="advantage",
    base="dapo",
    title="Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations",
    arxiv="2602.05885",
    year=2026,
)
def trloo_advantage(turn_rewards, turn_ids, mask, group_ids, *, gamma=1.0):
    """Reward-to-go of a turn minus its mean over the prompt's other trajectories, [B,T].

        G_bk = turn_rewards_bk + gamma G_b,k+1                              over all columns
        A_bk = G_bk - mean of G_jk over the N - 1 others with a valid turn k of the same group
        A_bt = m_bt A_b,turn(t)

    A turn is valid if it has a valid token; the reward of one that is not still flows into earlier
    returns. N = 1: A = G. N >= 2 equal returns: exactly 0. No division by a spread.

    Args:
      turn_rewards: [B,K].
      turn_ids: [B,T] int.
      mask: [B,T].
      group_ids: [B] int.
      gamma: discount per turn.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2602.05885; hkust-nlp/KernelGYM.
    """
    g = reward_to_go(turn_rewards, jnp.ones_like(turn_rewards), gamma)
    valid = turn_mask(turn_ids, mask, turn_rewards.shape[1])
    n = column_sum(valid, group_ids)
    mean = column_sum(valid * g, group_ids) / jnp.maximum(n, 1)
    top = column_max(jnp.where(valid > 0, g, -jnp.inf), group_ids)
    bottom = -column_max(jnp.where(valid > 0, -g, -jnp.inf), group_ids)
    against_others = jnp.where(top <= bottom, 0.0, n / jnp.maximum(n - 1, 1) * (g - mean))
    return to_tokens(jnp.where(n > 1, against_others, g), turn_ids, mask)


def profiling_reward(correct, speedup, coverage, valid):
    """Reward of a kernel that ran: 0.5 correct + 0.5 clip(speedup, 0, 3) + 0.5 coverage correct.

    Args:
      correct: [B,K] 1 or 0.
      speedup: [B,K] against the reference implementation.
      coverage: [B,K] share of run time spent in the model's own kernels, in [0, 1].
      valid: [B,K] 0 where the turn did not run or was caught cheating; its reward is 0.

    Returns:
      rewards [B,K].
    """
    reward = 0.5 * correct + 0.5 * jnp.clip(speedup, 0.0, 3.0) + 0.5 * coverage * correct
    return jnp.where(jnp.asarray(valid) > 0, reward, 0.0)


def profiling_keep_prob(correct, coverage):
    """Probability of keeping a turn: clip((coverage - 0.3) / 0.1, 0, 1) where correct, else 1.

    A Bernoulli draw per turn decides; all tokens of a rejected turn get mask 0.

    Args:
      correct, coverage: [B,K], as in `profiling_reward`.
    """
    coverage = jnp.asarray(coverage, jnp.result_type(float))
    return jnp.where(jnp.asarray(correct) > 0, jnp.clip((coverage - 0.3) / 0.1, 0.0, 1.0), 1.0)
