"""REINFORCE leave-one-out."""

import jax

from losses.catalogue import paper
from losses.ops.groups import all_equal, group_size, leave_one_out_mean


@paper(
    "rloo",
    kind="advantage",
    base="reinforce",
    title="Back to Basics: Revisiting REINFORCE-Style Optimization in LLMs",
    arxiv="2402.14740",
    year=2024,
)
def rloo_advantage(rewards, group_ids):
    """Reward minus the mean reward of the other responses to the prompt, [B].

        A_i = r_i - (1 / (n_g - 1)) sum_{j in g, j != i} r_j

    Group of one: A_i = r_i (as in verl). A group of two or more with equal rewards: exactly 0.

    Args:
      rewards: [B].
      group_ids: [B] int.

    Returns:
      advantages [B], constant.

    Reference: Ahmadian et al. 2024, arXiv 2402.14740.
    """
    value = rewards - leave_one_out_mean(rewards, group_ids)
    flat = all_equal(rewards, group_ids) & (group_size(group_ids) > 1)
    return jax.numpy.where(flat, 0.0, value)
