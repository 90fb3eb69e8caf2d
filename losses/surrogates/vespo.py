"""VESPO: a Gamma-shaped kernel on the true sequence ratio."""

import math

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import first_valid, masked_mean, masked_sum
from losses.ops.ratios import BOUND, log_ratio
from losses.ops.surrogates import ratio_metrics

LOG_FLOOR = math.log(1e-8)


@paper(
    "vespo",
    kind="objective",
    title="VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM "
    "Training",
    arxiv="2602.10693",
    year=2026,
    when={"sampler_logprobs": lambda h: h["is_cap"] is not None},
    metric="weight_mean",
)
def vespo_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    sampler_logprobs=None,
    *,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
    is_cap=None,
):
    """REINFORCE with a constant weight that peaks near a sequence ratio of 1 and fades either way.

        log W_i = clip( sum_t m clip(d_it, -20, 20)  [+ sum_t m log omega_it], log 1e-8, 20 )
        phi_i   = exp( lam + k log W_i - lam W_i ),   (k, lam) by the sign of A_i, phi(1) = 1
        loss    = - sum_it m phi_i A_it logprobs_it / sum m,    d = logprobs - old_logprobs

    omega = min(exp(old_logprobs - sampler_logprobs), is_cap) where sampler_logprobs is given, its
    log clamped to [log 1e-8, 20] first. No length normalisation. A_i is the advantage of the row's
    first valid token. lam is at least 1e-4; a phi that is not finite becomes 0.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      sampler_logprobs: [B,T] or None: no omega; needed once is_cap is set.
      k_pos, lambda_pos, k_neg, lambda_neg: the kernel, greatest at W = k / lam.
      is_cap: upper bound of omega (TRL: 3); None: none.

    Returns:
      (loss, metrics).

    Reference: arXiv 2602.10693; authors' code and TRL (the code's docstring lists other defaults).
    """
    d = log_ratio(logprobs, old_logprobs, mask).clip(-BOUND, BOUND)
    if sampler_logprobs is not None:
        omega = log_ratio(old_logprobs, sampler_logprobs, mask).clip(LOG_FLOOR, BOUND)
        d = d + (omega if is_cap is None else jnp.minimum(omega, math.log(is_cap)))
    log_w = jax.lax.stop_gradient(masked_sum(d, mask, axis=-1).clip(LOG_FLOOR, BOUND))
    good = masked_sum(advantages * first_valid(mask), mask, axis=-1) >= 0
    k = jnp.where(good, k_pos, k_neg)
    lam = jnp.where(good, max(lambda_pos, 1e-4), max(lambda_neg, 1e-4))
    phi = jnp.exp(lam + k * log_w - lam * jnp.exp(log_w))
    phi = jnp.where(jnp.isfinite(phi), phi, 0.0)[:, None]
    metrics = {
        "weight_mean": masked_mean(jnp.broadcast_to(phi, mask.shape), mask),
        "sequence_log_ratio": jnp.mean(log_w),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return -masked_mean(phi * advantages * logprobs, mask), metrics
