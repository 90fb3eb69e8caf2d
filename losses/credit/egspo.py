"""EGSPO: the full update for uncertain tokens, an attenuated one for the rest."""

import jax
import jax.numpy as jnp

from losses.catalogue import nearest, paper
from losses.ops.masked import count, masked_mean, masked_min
from losses.ops.order import share, top
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "egspo",
    kind="objective",
    base="ppo",
    title="Entropy-Gated Selective Policy Optimization: Token-Level Gradient Allocation for "
    "Hybrid Training of Large Language Models",
    arxiv="2602.03309",
    year=2026,
    metric="weight_mean",
)
def egspo_loss(
    logprobs,
    old_logprobs,
    old_entropy,
    advantages,
    mask,
    *,
    rho=0.2,
    phi="chord",
    clip_low=0.2,
    clip_high=0.2,
):
    """The clipped surrogate, attenuated on tokens where the policy was certain.

        thr  = the k-th largest old_entropy of the N valid tokens,  k = max(1, ceil(rho N))
        w_it = 1 where old_entropy_it >= thr, else phi(p_it);  phi(p) = p (1 - p), p = exp(logprobs)
        loss = - sum m w min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) / N

    w is constant; N counts all valid tokens. Ties at the threshold all get the full update. The
    log-ratio is held only where exp would overflow float32.

    Args:
      logprobs, old_logprobs, old_entropy, advantages, mask: [B,T]; entropies in nats.
      rho: share of the tokens that get the full update.
      phi: "chord" for p (1 - p) under the current policy, or a constant attenuation.
      clip_low, clip_high: the ratio's window is [1 - clip_low, 1 + clip_high].

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown phi.

    Reference: arXiv 2602.03309, from the abstract; that phi is CHORD's p (1 - p) under the current
    policy, the batch quantile and rho are assumptions.
    """
    k = jnp.maximum(share(rho, count(mask)), 1)
    threshold = masked_min(old_entropy, top(old_entropy, mask, k, axis=None))
    uncertain = old_entropy >= threshold
    p = jnp.exp(jax.lax.stop_gradient(logprobs))
    if not isinstance(phi, str):
        attenuation = phi
    elif phi == "chord":
        attenuation = p * (1 - p)
    else:
        raise ValueError(
            f"Unknown phi {phi!r}.{nearest(phi, ('chord',))} Either 'chord' or a number."
        )
    weight = jnp.where(uncertain, 1.0, attenuation)
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high)
    metrics = {
        "weight_mean": masked_mean(weight, mask),
        "kept_fraction": masked_mean(uncertain.astype(mask.dtype), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return masked_mean(weight * term, mask), metrics
