"""Proximal policy optimisation with a value head."""

import jax
import jax.numpy as jnp

from losses.baselines.gae import gae
from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_mean, masked_var, select
from losses.ops.masked import whiten as whitened
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "ppo",
    kind="objective",
    title="Proximal Policy Optimization Algorithms",
    arxiv="1707.06347",
    year=2017,
    metric="value_loss",
)
def ppo_loss(
    logprobs,
    values,
    entropy,
    old_logprobs,
    old_values,
    token_rewards,
    mask,
    advantages=None,
    *,
    gamma=1.0,
    lam=0.95,
    clip_low=0.2,
    clip_high=0.2,
    value_clip=0.2,
    value_coef=0.1,
    entropy_coef=0.0,
    whiten=True,
    aggregation="token_mean",
    max_length=None,
):
    """Clipped surrogate, clipped value error, GAE and an entropy bonus.

        A    = gae(token_rewards, old_values),  R = A + old_values,  then A whitened
        pg_t = - min( r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t )
        v'_t = old_values_t + clip(values_t - old_values_t, -value_clip, value_clip)
        vf_t = 0.5 max( (values_t - R_t)^2, (v'_t - R_t)^2 )
        loss = agg(pg) + value_coef agg(vf) - entropy_coef agg(entropy)

    r = exp(logprobs - old_logprobs), the log-ratio clamped to +-20. A, R and old_* are constants.

    Args:
      logprobs, values, entropy: [B,T] of the current policy.
      old_logprobs, old_values, token_rewards: [B,T] of the rollout.
      mask: [B,T].
      advantages: [B,T] or None; given (by an advantage stage of a composition), they stand in for
        the whitened GAE in the policy term; the value targets stay GAE's.
      value_clip: half-width of the value window; None drops v'.
      aggregation: of all three terms; `max_length` is for "constant" only.

    Returns:
      (loss, metrics).

    Reference: Schulman et al. 2017, arXiv 1707.06347; defaults of TRL. Whitening and value clipping
    are common practice rather than the paper's text.
    """
    raw = gae(token_rewards, old_values, mask, gamma=gamma, lam=lam)
    targets = select(raw + old_values, mask)
    if advantages is None:
        advantages = whitened(raw, mask, ddof=1, eps=1e-8) if whiten else raw
    ratio = token_ratio(logprobs, old_logprobs, mask)
    policy = -clipped_surrogate(ratio, advantages, clip_low, clip_high)

    values, old = select(values, mask), select(old_values, mask)
    error = (values - targets) ** 2
    if value_clip is not None:
        clipped = (old + jnp.clip(values - old, -value_clip, value_clip) - targets) ** 2
        value_clipped = clipped > error
        error = jnp.where(value_clipped, clipped, error)
    else:
        value_clipped = jnp.zeros_like(error, bool)

    def agg(x):
        return aggregate(x, mask, aggregation, max_length)

    value_loss = agg(0.5 * error)
    loss = agg(policy) + value_coef * value_loss - entropy_coef * agg(entropy)
    residual = jax.lax.stop_gradient(targets - values)
    variance = masked_var(targets, mask)
    explained = 1 - masked_var(residual, mask) / jnp.where(variance > 0, variance, 1.0)
    metrics = {
        "value_loss": jax.lax.stop_gradient(value_loss),
        "value_clip_fraction": masked_mean(value_clipped.astype(mask.dtype), mask),
        "explained_variance": jnp.where(variance > 0, explained, 0.0),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return loss, metrics
