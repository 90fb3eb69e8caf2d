"""SetPO: each rollout is paid its marginal contribution to the diversity of its group."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops import groups


@paper(
    "setpo",
    kind="advantage",
    base="grpo",
    title="SetPO: Set-Level Policy Optimization for Diversity-Preserving LLM Reasoning",
    arxiv="2602.01062",
    year=2026,
)
def setpo_advantage(
    rewards, group_ids, similarity: Float[Array, "B B"], *, lam=0.5, correct_only=False
):
    """GRPO's advantage plus a leave-one-out share of the group's diversity, [B].

        D(S)  = (1/|S|) sum_{i in S} -log( 1 + sum_{j in S, j != i} k_ij )    0 for one or none
        A_i   = (r_i - mean) / (std + 1e-6) + lam ( D(group) - D(group without i) )

    Near-copies pay, strangers are paid; nothing is normalised again. A group of one: r / (1 + 1e-6)
    and no diversity term.

    Args:
      rewards: [B].
      group_ids: [B] int.
      similarity: [B,B] symmetric kernel in [0, 1], 1 on the diagonal; read within groups only.
      lam: weight of the diversity.
      correct_only: diversity for responses of the group's highest reward only. Ours.

    Returns:
      advantages [B], constant.

    Reference: arXiv 2602.01062, at second hand: the sum inside the logarithm, the mean over the set
    and lam are assumed.
    """
    members = groups.same_group(group_ids)
    others = members & ~jnp.eye(rewards.shape[0], dtype=bool)
    k = jnp.where(others, similarity, 0)
    redundancy = jnp.sum(k, axis=1)
    n = jnp.sum(members, axis=1).astype(rewards.dtype)
    whole = groups.group_mean(-jnp.log1p(redundancy), group_ids)
    without = jnp.where(others, -jnp.log1p(redundancy[None, :] - k), 0)
    rest = jnp.sum(without, axis=1) / jnp.maximum(n - 1, 1)
    marginal = whole - rest
    if correct_only:
        best = rewards >= groups.group_max(rewards, group_ids)
        marginal = jnp.where(best, marginal, 0.0)
    return groups.standardised_or_raw(rewards, group_ids) + lam * marginal
