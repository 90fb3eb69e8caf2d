"""PEPO: advantages spread by how much a token's hidden state resembles the conditioning span."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.masked import count, masked_max, masked_mean, masked_min, select


@paper(
    "pepo",
    kind="credit",
    base="grpo",
    title="Rethinking Token-Level Policy Optimization for Multimodal Chain-of-Thought",
    arxiv="2603.22847",
    year=2026,
    stages={"objective": ("grpo_loss", {"beta": 0.001})},
)
def pepo_advantage(
    advantages,
    context_scores: Tokens,
    old_entropy,
    mask,
    *,
    progress=1.0,
    gate_alpha=0.05,
    gate_temperature=1.8,
):
    """Advantage weighted by a softmax over grounding, gated towards uncertain tokens.

        x_t  = minmax(v)_t + minmax(h)_t,   gate_t = 1 + gate_alpha tanh(x_t - mean x)
        w_t  = n softmax( v_t gate_t / gate_temperature )
        out  = A (1 - progress + progress w)

    v = context_scores, h = old_entropy; everything per response over its n valid tokens, minmax
    with a denominator of at least 1e-6. w is positive and averages to 1.

    Args:
      advantages, old_entropy, mask: [B,T].
      context_scores: [B,T] cosine of the token's hidden state with those of the conditioning span,
        mean over span tokens and layers; 0 everywhere where the prompt has no span.
      progress: share of the weighting, clipped to [0, 1]; training step / total steps. May be
        traced.
      gate_alpha: half-width of the gate.
      gate_temperature: of the softmax.

    Returns:
      advantages [B,T]; zeros on a fully masked row.

    Reference: arXiv 2603.22847. The released trainer leaves the weights in the graph; here they
    are constant.
    """
    v = select(context_scores, mask)
    x = _minmax(v, mask) + _minmax(old_entropy, mask)
    gate = 1 + gate_alpha * jnp.tanh(x - masked_mean(x, mask, -1, keepdims=True))
    z = v * gate / gate_temperature
    e = select(jnp.exp(select(z - masked_max(z, mask, -1, keepdims=True), mask)), mask)
    total = jnp.sum(e, axis=-1, keepdims=True)
    weight = count(mask, -1, keepdims=True) * e / jnp.where(total > 0, total, 1.0)
    progress = jnp.clip(progress, 0.0, 1.0)
    return select(advantages * (1 - progress + progress * weight), mask)


def _minmax(x, mask):
    low, high = masked_min(x, mask, -1, keepdims=True), masked_max(x, mask, -1, keepdims=True)
    return (x - low) / jnp.maximum(high - low, 1e-6)
