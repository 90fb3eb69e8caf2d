"""HICRA: credit tilted towards planning tokens, and the search for them."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.masked import select


@paper(
    "hicra",
    kind="credit",
    base="grpo",
    title="Emergent Hierarchical Reasoning in LLMs through Reinforcement Learning (HICRA)",
    arxiv="2509.03646",
    year=2025,
    stages={"advantage": ("grpo_advantage", {"scale": "none"})},
)
def hicra_advantage(advantages, planning_mask: Tokens, mask, *, alpha=0.2):
    """Planning tokens of good responses gain, those of bad ones lose less, [B,T].

        out_it = m_it ( A_it + alpha |A_it| ) on planning tokens,   m_it A_it elsewhere

    The paper's A is reward minus group mean, unscaled.

    Args:
      advantages, mask: [B,T].
      planning_mask: [B,T] 1 on members of strategic phrases; see `planning_mask`.
      alpha: in (0, 1), which keeps signs.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2509.03646.
    """
    planning = select(planning_mask, mask) > 0
    tilted = advantages + alpha * jnp.abs(advantages)
    return select(jnp.where(planning, tilted, advantages), mask)


def planning_mask(tokens, grams, mask=None):
    """0/1 array [B,T]: the token lies inside an occurrence of one of the n-grams.

    Overlapping occurrences merge; none crosses a masked position.

    Args:
      tokens: [B,T] int.
      grams: sequence of token sequences, of any lengths; static.
      mask: [B,T] or None for all ones.
    """
    tokens = jnp.asarray(tokens)
    valid = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask) > 0
    inside = jnp.zeros(tokens.shape, bool)
    by_length: dict[int, list] = {}
    for gram in grams:
        by_length.setdefault(len(gram), []).append(list(gram))
    for n, members in by_length.items():
        if not 0 < n <= tokens.shape[1]:
            continue
        starts = tokens.shape[1] - n + 1
        wanted = jnp.asarray(members)  # [G,n]
        match = jnp.ones((tokens.shape[0], starts, len(members)), bool)
        for j in range(n):
            here = slice(j, j + starts)
            same = tokens[:, here, None] == wanted[:, j]
            match = match & same & valid[:, here, None]
        found = jnp.any(match, axis=-1)
        for j in range(n):
            inside = inside.at[:, j : j + starts].max(found)
    return inside.astype(jnp.result_type(float))


def planning_entropy(gram_ids):
    """Shannon entropy, nats, of the strategic grams found in a batch of responses.

        H = - sum_g p_g log p_g,   p_g the gram's share of all occurrences

    Args:
      gram_ids: int array of any shape, one entry per occurrence; negative entries are padding.
    """
    ids = jnp.asarray(gram_ids).reshape(-1)
    used = ids >= 0
    alike = jnp.sum((ids[:, None] == ids[None, :]) & used, axis=-1)
    n = jnp.maximum(jnp.sum(used), 1)
    share = jnp.where(used, alike, n) / n
    return -jnp.sum(jnp.where(used, jnp.log(share), 0.0)) / n
