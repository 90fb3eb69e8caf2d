"""GMPO: the geometric mean of the token ratios, clipped in log space."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import WIDE_BOUND, bounded_exp, log_ratio
from losses.ops.surrogates import ratio_metrics


@paper(
    "gmpo",
    kind="objective",
    title="Geometric-Mean Policy Optimization",
    arxiv="2507.20673",
    year=2025,
    metric="clip_fraction",
)
def gmpo_loss(logprobs, old_logprobs, advantages, mask, *, log_clip_low=0.4, log_clip_high=0.4):
    """Token log-ratios clipped on the pessimistic side, averaged, exponentiated once per response.

        c_it = min(d_it, log_clip_high) if A_i >= 0 else max(d_it, -log_clip_low)
        loss = - mean_i A_i exp( sum_t m_it c_it / |y_i| ),   d = logprobs - old_logprobs

    A_i is the row's mean advantage. Clipped tokens have no gradient, the row's others keep theirs.
    A fully masked row adds 0 and counts in the mean.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      log_clip_low, log_clip_high: bounds of the log-ratio, nats; None: no bound.

    Returns:
      (loss, metrics).

    Reference: Zhao et al. 2025, arXiv 2507.20673; verl, TRL.
    """
    d = log_ratio(logprobs, old_logprobs, mask)
    gain = masked_mean(advantages, mask, axis=-1)
    high = jnp.inf if log_clip_high is None else log_clip_high
    low = -jnp.inf if log_clip_low is None else -log_clip_low
    rising = (gain >= 0)[:, None]
    clipped = jnp.where(rising, d > high, d < low)
    held = jnp.where(clipped, jnp.where(rising, high, low), d)
    ratio = bounded_exp(masked_mean(held, mask, axis=-1), WIDE_BOUND)
    metrics = {
        "clip_fraction": masked_mean(clipped.astype(mask.dtype), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return -jnp.mean(gain * ratio), metrics
