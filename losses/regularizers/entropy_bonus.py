"""Entropy bonus."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import aggregate


@paper(
    "entropy-bonus",
    kind="regularizer",
    base="grpo",
    title="Entropy bonus (A3C, PPO; the maximum-entropy baseline)",
    arxiv="1602.01783",
    year=2016,
    metric="entropy_bonus",
)
def entropy_bonus(
    entropy, mask, *, entropy_coef=0.01, target=None, aggregation="token_mean", max_length=None
):
    """Minus the mean token entropy.

        loss = -entropy_coef H,   H = agg(entropy);   with a target: -entropy_coef min(H, target)

    Args:
      entropy: [B,T] of the full next-token distribution, nats, differentiable.
      mask: [B,T].
      entropy_coef: weight.
      target: no push once H is above it; None: always push. An addition of ours.
      aggregation: of the token terms; `max_length` is for "constant" only.

    Returns:
      (loss, metrics).

    Reference: Mnih et al. 2016, arXiv 1602.01783.
    """
    mean = aggregate(entropy, mask, aggregation, max_length)
    held = mean if target is None else jnp.minimum(mean, target)
    return -entropy_coef * held, {"entropy_bonus": jax.lax.stop_gradient(entropy_coef * held)}
