"""TOPR: off-policy REINFORCE whose importance weight tapers on wrong answers only."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean, masked_sum
from losses.ops.ratios import bounded_exp, sequence_log_ratio
from losses.ops.surrogates import ratio_metrics


@paper(
    "topr",
    kind="objective",
    title="Tapered Off-Policy REINFORCE - Stable and efficient reinforcement learning for LLMs",
    arxiv="2503.14286",
    year=2025,
    metric="negative_weight_mean",
)
def topr_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    *,
    baseline=0.0,
    pos_bounds=(1.0, 1.0),
    neg_bounds=(0.0, 1.0),
):
    """REINFORCE with a constant sequence weight: 1 on good responses, min(pi/mu, 1) on bad ones.

        l_b   = sum_t m logprobs,   rho_b = exp( l_b - sum_t m old_logprobs )
        R_b   = rewards_b - baseline
        w_b   = clip(rho_b, *pos_bounds) if R_b >= 0 else clip(rho_b, *neg_bounds)
        loss  = - mean_b stop_grad(w_b) R_b l_b

    The log-ratio is clamped to +-20. Sums over tokens, no group baseline; fully masked rows add 0
    and count in B. Rewards are meant to be +1 and -1.

    Args:
      logprobs, old_logprobs, mask: [B,T]; old is the policy that made the data.
      rewards: [B].
      baseline: re-weights the share of correct responses.
      pos_bounds, neg_bounds: (low, high) of the weight by the sign of R; None: no bound.

    Returns:
      (loss, metrics).

    Reference: Le Roux et al. 2025, arXiv 2503.14286.
    """
    rho = jax.lax.stop_gradient(
        bounded_exp(sequence_log_ratio(logprobs, old_logprobs, mask, normalise=False))
    )
    gain = rewards - baseline
    good = gain >= 0
    weight = jnp.where(good, _between(rho, *pos_bounds), _between(rho, *neg_bounds))
    loss = -jnp.mean(weight * gain * masked_sum(logprobs, mask, axis=-1))
    metrics = {
        "negative_weight_mean": masked_mean(weight, (~good).astype(mask.dtype)),
        "weight_mean": jnp.mean(weight),
        "positive_fraction": jnp.mean(good.astype(mask.dtype)),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return loss, metrics


def _between(x, low, high):
    return jnp.clip(x, -jnp.inf if low is None else low, jnp.inf if high is None else high)
