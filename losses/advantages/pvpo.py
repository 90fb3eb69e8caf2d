"""PVPO: the reference model's past reward on the prompt as a static baseline."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from losses.catalogue import paper
from losses.ops import groups


@paper(
    "pvpo",
    kind="advantage",
    base="grpo",
    title="PVPO: Pre-Estimated Value-Based Policy Optimization for Agentic Reasoning",
    arxiv="2508.21104",
    year=2025,
    stages={"objective": ("grpo_loss", {"beta": 0.001})},
)
def pvpo_advantage(
    rewards, group_ids, ref_rewards: Float[Array, "N"], ref_group_ids: Int[Array, "N"]
):
    """Reward minus the mean reward of the reference's stored rollouts of the prompt, [B].

        A_i = r_i - mean{ ref_rewards_n : ref_group_ids_n = group_ids_i }

    Not centred, not scaled; a group of one is fine. A prompt without reference rollouts takes its
    own group's mean. For a trajectory injected from another model put that model's
    log-probabilities into its row of `old_logprobs`.

    Args:
      rewards: [B].
      group_ids: [B] int.
      ref_rewards: [N] rewards of the stored rollouts.
      ref_group_ids: [N] int, their prompts, labelled as in group_ids.

    Returns:
      advantages [B], constant.

    Reference: arXiv 2508.21104, at second hand; the base's KL weight is assumed.
    """
    stored = group_ids[:, None] == ref_group_ids[None, :]
    n = jnp.sum(stored, axis=1)
    value = jnp.sum(jnp.where(stored, ref_rewards[None, :], 0), axis=1) / jnp.maximum(n, 1)
    return jnp.where(n > 0, rewards - value, groups.centred(rewards, group_ids))


def pvpo_filter(accuracy, solved_elsewhere=None):
    """Which prompts to train on, from the reference's accuracy on them, [P] of 0 and 1.

    Dropped: prompts always solved, and prompts never solved unless a stronger source has a right
    trajectory, which then stands in for one of the prompt's rollouts.

    Args:
      accuracy: [P] in [0, 1].
      solved_elsewhere: [P] 1 where such a trajectory is stored; None: nowhere.
    """
    accuracy = jnp.asarray(accuracy, jnp.result_type(float))
    stored = jnp.zeros_like(accuracy) if solved_elsewhere is None else jnp.asarray(solved_elsewhere)
    return ((accuracy < 1) & ((accuracy > 0) | (stored > 0))).astype(accuracy.dtype)
