"""Advantages tilted towards low-perplexity responses and towards the end of responses."""

import jax
import jax.numpy as jnp

from losses.catalogue import nearest, paper
from losses.ops.masked import lengths, masked_mean, select
from losses.ops.pools import row_scores

MODES = ("ppl", "position", "both")


@paper(
    "entropy-exchange",
    kind="credit",
    base="grpo",
    title="Decomposing the Entropy-Performance Exchange: The Missing Keys to Unlocking Effective "
    "Reinforcement Learning",
    arxiv="2508.02260",
    year=2025,
)
def entropy_exchange_advantage(
    advantages,
    old_logprobs,
    group_ids,
    mask,
    *,
    mode="ppl",
    alpha=0.01,
    gamma=0.1,
    direction=1.0,
    eps=1e-8,
):
    """Two small corrections of the advantage: one per response, one per position, [B,T].

        w_i    = (log ppl_i - mean) / (std + eps)      over the group's responses with a valid token
        "ppl"       out = m A (1 - alpha w_i)
        rho_it = (rank of t among the n_i valid tokens, from 1) / n_i
        "position"  out = m ( A + sign(A) gamma sigmoid(direction rho_it) )
        "both"      position on the result of ppl

    log ppl_i is minus the mean of old_logprobs; std is the population's. Fewer than two usable
    responses, or a spread of at most 1e-6: w = 0.

    Args:
      advantages, old_logprobs, mask: [B,T].
      group_ids: [B] int.
      mode: "ppl", "position" or "both".
      alpha: strength of the perplexity term.
      gamma: size of the position term.
      direction: slope along the response; positive favours its end.
      eps: added to the standard deviation.

    Returns:
      advantages [B,T], constant.

    Raises:
      ValueError: unknown mode.

    Reference: arXiv 2508.02260, read second-hand; the sigmoid of the position, the group as scope
    and the constants are assumptions. The paper applies it once entropy has stopped falling.
    """
    if mode not in MODES:
        raise ValueError(f"Unknown mode {mode!r}.{nearest(mode, MODES)} One of {', '.join(MODES)}.")
    out = advantages
    if mode != "position":
        log_ppl = -masked_mean(old_logprobs, mask, axis=-1)
        score = row_scores(log_ppl, jnp.any(mask > 0, axis=-1), group_ids, eps=eps)
        out = out * (1 - alpha * score)[:, None]
    if mode != "ppl":
        place = jnp.cumsum(mask > 0, axis=-1) / jnp.maximum(lengths(mask), 1)[:, None]
        out = out + jnp.sign(out) * gamma * jax.nn.sigmoid(direction * place)
    return select(out, mask)
