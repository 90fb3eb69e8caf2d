"""SAO: one rollout per prompt, a critic that skips observations, a two-sided hard mask."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import lengths, masked_mean
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.returns import generalised_advantages, outcome_to_tokens, reward_to_go
from losses.ops.surrogates import ratio_metrics


@paper(
    "sao",
    kind="objective",
    title="Single-Rollout Asynchronous Optimization for Agentic Reinforcement Learning",
    arxiv="2607.07508",
    year=2026,
    metric="removed_fraction",
)
def sao_loss(
    logprobs,
    sampler_logprobs,
    mask,
    rewards,
    old_values,
    *,
    clip_low=0.3,
    clip_high=5.0,
    alpha=1.5,
    lam=None,
    gamma=1.0,
):
    """REINFORCE weighted by the ratio to the sampler inside a fixed interval, 0 outside.

        lambda_b = lam, or max(0, 1 - 1 / (alpha L_b)) if lam is None
        A        = GAE over the row's valid tokens, reward on the last, V = old_values
        f        = stop_grad(r) if 1 - clip_low < r < 1 + clip_high else 0
        loss     = - sum m f A logprobs / sum m,    r = exp(logprobs - sampler_logprobs)

    L counts policy tokens; observations inside a row take no part. The interval removes tokens
    whatever the sign of A; removed tokens stay in the denominator. A is not whitened. The critic is
    trained beside it on `sao_value_targets` (`sao_value_loss` is a regularizer of that form).

    Args:
      logprobs, sampler_logprobs, mask: [B,T].
      rewards: [B].
      old_values: [B,T] of the critic before the update.
      clip_low, clip_high: the open interval of r; None: no bound on that side.
      alpha: of the length-adaptive lambda.
      lam: a fixed lambda instead.
      gamma: discount per policy token.

    Returns:
      (loss, metrics).

    Reference: arXiv 2607.07508, after notes that quote it; gamma, the detached f, the denominator
    and the value loss are assumed.
    """
    decay = jnp.maximum(1 - 1 / (alpha * jnp.maximum(lengths(mask), 1)), 0.0)
    decay = decay if lam is None else jnp.full_like(decay, lam)
    dense = outcome_to_tokens(rewards, mask)
    gain = generalised_advantages(dense, old_values, mask, gamma, decay)
    ratio = jax.lax.stop_gradient(token_ratio(logprobs, sampler_logprobs, mask, WIDE_BOUND))
    low = -jnp.inf if clip_low is None else 1 - clip_low
    high = jnp.inf if clip_high is None else 1 + clip_high
    kept = (ratio > low) & (ratio < high)
    weight = jnp.where(kept, ratio, 0.0)
    metrics = {
        "removed_fraction": masked_mean((~kept).astype(mask.dtype), mask),
        "weight_mean": masked_mean(weight, mask),
        "advantage_abs": masked_mean(jnp.abs(gain), mask),
        **ratio_metrics(logprobs, sampler_logprobs, mask),
    }
    return -masked_mean(weight * gain * logprobs, mask), metrics


def sao_value_targets(mask, rewards, *, gamma=1.0):
    """Discounted outcome seen from each policy token: gamma^(L - k) R at the k-th of L, [B,T]."""
    mask, rewards = jnp.asarray(mask), jnp.asarray(rewards)
    return reward_to_go(outcome_to_tokens(rewards, mask), mask, gamma)


def sao_value_loss(values, mask, rewards, *, gamma=1.0, value_coef=1.0):
    """value_coef times the mean over valid tokens of (values - sao_value_targets)^2 / 2.

    Args:
      values, mask: [B,T].
      rewards: [B].

    Returns:
      (loss, metrics).
    """
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    error = values - sao_value_targets(mask, rewards, gamma=gamma)
    mean = masked_mean(error**2 / 2, mask)
    return value_coef * mean, {"value_loss": jax.lax.stop_gradient(mean)}
