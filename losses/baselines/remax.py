"""ReMax: the greedy response as baseline."""

from losses.arrays import Rows
from losses.catalogue import paper


@paper(
    "remax",
    kind="advantage",
    base="reinforce",
    title="ReMax: A Simple, Effective, and Efficient RL Method for Aligning Large Language Models",
    arxiv="2310.10505",
    year=2023,
)
def remax_advantage(rewards, greedy_rewards: Rows):
    """Reward minus the reward of the greedy response to the same prompt, [B].

        A_i = r_i - r(greedy response of row i's prompt)

    Args:
      rewards: [B].
      greedy_rewards: [B] reward of the argmax response under the policy that sampled row i.

    Returns:
      advantages [B], constant.

    Reference: Li et al. 2023, arXiv 2310.10505.
    """
    return rewards - greedy_rewards
