"""Masked importance sampling: tokens with too large a mismatch are removed."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.surrogates.tis import mismatch_ratio


@paper(
    "mis",
    kind="credit",
    base="grpo",
    title="Masked importance sampling (IcePop; When Speed Kills Stability)",
    arxiv="2510.18855",
    year=2025,
)
def mis_credit(
    advantages,
    old_logprobs,
    sampler_logprobs,
    mask,
    *,
    level="token",
    low=0.5,
    high=2.0,
    weighted=True,
):
    """Advantages times the trainer/sampler ratio inside [low, high], 0 outside, [B,T].

        rho = exp(d_it) or exp(sum_t m_it d_it),   d = old_logprobs - sampler_logprobs
        w   = rho if low <= rho <= high else 0                    bounds inclusive
        out = m w A

    Denominators of the loss keep counting the removed tokens (as TRL and AReaL; verl drops them).

    Args:
      advantages, old_logprobs, sampler_logprobs, mask: [B,T].
      level: "token" or "sequence".
      low, high: bounds of rho; None: no bound on that side.
      weighted: False is the pure rejection mask, w = 1 inside.

    Returns:
      advantages [B,T], constant.

    Reference: IcePop, arXiv 2510.18855; TRL, verl.
    """
    ratio = mismatch_ratio(old_logprobs, sampler_logprobs, mask, level)
    low = -jnp.inf if low is None else low
    high = jnp.inf if high is None else high
    weight = jnp.where((ratio >= low) & (ratio <= high), ratio if weighted else 1.0, 0.0)
    return select(weight * advantages, mask)
