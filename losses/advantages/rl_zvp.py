"""RL-ZVP: prompts answered all alike learn from the entropy of their tokens."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_max, select

NO_SPREAD = 1e-8


@paper(
    "rl-zvp",
    kind="advantage",
    base="grpo",
    title="No Prompt Left Behind: Exploiting Zero-Variance Prompts in LLM Reinforcement Learning "
    "via Entropy-Guided Advantage Shaping",
    arxiv="2509.21880",
    year=2025,
)
def rl_zvp_advantage(rewards, group_ids, entropy, mask, *, alpha=0.1, threshold=0.0):
    """GRPO's advantage, and an entropy-guided one where the group's rewards are equal, [B,T].

        rewards differ       A_it = (r_i - mean) / (std + 1e-6)              std unbiased
        equal, > threshold   A_it = alpha H_it
        equal otherwise      A_it = -alpha (max_t H_it - H_it)               over the row's tokens

    Equal: max - min <= 1e-8, a group of one included. Use it without dynamic sampling.

    Args:
      rewards: [B].
      group_ids: [B] int.
      entropy: [B,T] of the policy, nats, constant here.
      mask: [B,T].
      alpha: scale of the entropy-guided advantages.
      threshold: rewards above it are right.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2509.21880, equation 5.
    """
    flat = groups.all_equal(rewards, group_ids, tolerance=NO_SPREAD)[:, None]
    right = (rewards > threshold)[:, None]
    surprise = jnp.where(right, entropy, entropy - masked_max(entropy, mask, 1, keepdims=True))
    usual = groups.standardised(rewards, group_ids, eps=1e-6)[:, None]
    return select(jnp.where(flat, alpha * surprise, usual), mask)
