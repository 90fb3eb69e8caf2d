"""AEM: turns weighted by how uncertain they were, against the other turns of the group."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_max, masked_min, masked_sum, select
from losses.ops.pools import TOLERANCE
from losses.ops.turns import first_of_turn, same_turn


@paper(
    "aem",
    kind="credit",
    base="grpo",
    title="AEM: Adaptive Entropy Modulation for Multi-Turn Agentic Reinforcement Learning",
    arxiv="2605.00425",
    year=2026,
)
def aem_advantage(advantages, old_entropy, turn_ids, group_ids, mask, *, lam=1.0, eps=1e-8):
    """Confident turns get a larger share of the advantage than uncertain ones, [B,T].

        u_ik  = mean old_entropy of the valid tokens of turn k of response i
        n_ik  = (u_ik - min u) / (max u - min u + eps)       over all turns of the group
        w_ik  = exp(-lam n_ik) / mean over the group's turns of exp(-lam n)
        out_it = m_it A_it w_i,turn(t)

    Every turn counts once, whatever its length; a turn is all valid tokens of a response with the
    same id, adjacent or not. Where max u - min u <= 1e-6, w = 1.

    Args:
      advantages, old_entropy, mask: [B,T]; entropies in nats.
      turn_ids: [B,T] int.
      group_ids: [B] int.
      lam: strength of the weighting; 0: none.
      eps: added to the range.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2605.00425, from the abstract: min-max scaling, the exponential and lam are
    assumptions that realise its account of entropy drift.
    """
    same = same_turn(turn_ids, mask)
    total = jnp.sum(jnp.where(same, old_entropy[:, None, :], 0.0), axis=-1)
    u = total / jnp.maximum(jnp.sum(same, axis=-1), 1)
    used = jnp.any(mask > 0, axis=-1)
    high = groups.group_max(masked_max(u, mask, axis=-1), group_ids, used)
    low = groups.group_min(masked_min(u, mask, axis=-1), group_ids, used)
    varied = (high - low > TOLERANCE) & used
    low, span = jnp.where(varied, low, 0.0), jnp.where(varied, high - low, 1.0)
    raw = jnp.exp(-lam * (u - low[:, None]) / (span + eps)[:, None])
    starts = first_of_turn(turn_ids, mask)
    turns = groups.group_sum(jnp.sum(starts, axis=-1), group_ids)
    mean = groups.group_sum(masked_sum(raw, starts, axis=-1), group_ids) / jnp.maximum(turns, 1)
    weight = jnp.where(varied[:, None], raw / jnp.where(varied, mean, 1.0)[:, None], 1.0)
    return select(advantages * weight, mask)
