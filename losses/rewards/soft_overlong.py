"""DAPO's soft overlong punishment."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from losses.catalogue import paper


@paper(
    "soft-overlong",
    kind="reward",
    base="dapo",
    title="DAPO (soft overlong punishment)",
    arxiv="2503.14476",
    year=2025,
)
def soft_overlong(rewards, lengths: Int[Array, "B"], *, max_length=20480, cache=4096, factor=1.0):
    """Rewards lowered linearly over the last `cache` tokens before the length limit, [B].

        pen(L) = 0                        L <= max_length - cache
               = (max_length - cache - L) / cache        up to max_length
               = -1                       beyond
        out_i  = rewards_i + factor pen(lengths_i)

    Args:
      rewards: [B].
      lengths: [B] int, tokens of each response.
      max_length, cache: the run's generation limit and the width of the ramp, tokens.
      factor: weight of the penalty.

    Returns:
      rewards [B], constant.

    Reference: Yu et al. 2025, arXiv 2503.14476. The floor at -1 is the paper's; verl has none.
    """
    lengths = lengths.astype(rewards.dtype)
    ramp = (max_length - cache - lengths) / cache if cache else jnp.zeros_like(rewards)
    penalty = jnp.where(lengths > max_length, -1.0, jnp.clip(ramp, -1.0, 0.0))
    return rewards + factor * penalty
