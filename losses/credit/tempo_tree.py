"""TEMPO: the change of a prefix's value in the tree of a prompt's responses."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import select


@paper(
    "tempo-tree",
    kind="advantage",
    base="grpo",
    title="Exploiting Tree Structure for Credit Assignment in RL Training of LLMs",
    arxiv="2509.18314",
    year=2025,
)
def tempo_advantage(rewards, tokens, group_ids, mask, *, scale=True, eps=1e-6):
    """Group-relative outcome plus the temporal difference of prefix values.

        V(p)   = mean reward of the group's responses that start with p         (V(empty) = mean)
        td_ij  = V(first j+1 valid tokens) - V(first j valid tokens)
        out_ij = ( r_i - mean + td_ij ) / ( std + eps )

    td is 0 except where the tree branches. Prefixes are compared token by token, masked positions
    skipped; a response that has ended counts at every prefix of itself and no longer one. Fully
    masked rows are in no statistic. One usable row, or equal rewards: zeros.

    Args:
      rewards, group_ids: [B].
      tokens: [B,T] int.
      mask: [B,T].
      scale: divide by the group's unbiased standard deviation.
      eps: added to it.

    Returns:
      advantages [B,T].

    Reference: arXiv 2509.18314, from reviews: the division of td by the deviation is theirs.
    """
    valid = mask > 0
    usable = jnp.any(valid, axis=1)
    front = jnp.argsort(~valid, axis=1, stable=True)
    own = jnp.take_along_axis(tokens, front, axis=1)
    there = jnp.take_along_axis(valid, front, axis=1)
    alike = (own[:, None] == own[None]) & there[:, None] & there[None]
    members = groups.same_group(group_ids, usable)[..., None]
    shared = members & jnp.cumprod(alike, axis=-1).astype(bool)
    shared = jnp.concatenate([members, shared], axis=-1)  # [B,B,T+1] by length of the prefix

    count = jnp.maximum(jnp.sum(shared, axis=1), 1).astype(rewards.dtype)
    value = jnp.sum(jnp.where(shared, rewards[None, :, None], 0), axis=1) / count
    rank = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
    td = jnp.take_along_axis(value[:, 1:] - value[:, :-1], rank, axis=1)

    advantages = groups.centred(rewards, group_ids, usable)[:, None] + td
    if scale:
        advantages = advantages / (groups.group_std(rewards, group_ids, 1, usable)[:, None] + eps)
    equal = groups.all_equal(rewards, group_ids, usable)[:, None]
    return select(jnp.where(equal, 0.0, advantages), mask)
