"""ASPO: the inverse ratio on positive tokens."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.order import quantile
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clip_metrics, clip_ratio, clipped_side, ratio_metrics


@paper(
    "aspo",
    kind="objective",
    base="grpo",
    title="ASPO: Asymmetric Importance Sampling Policy Optimization",
    arxiv="2510.06062",
    year=2025,
    gradients=("logprobs",),
    metric="weight_mean",
)
def aspo_loss(
    logprobs,
    old_logprobs,
    entropy,
    mask,
    advantages,
    *,
    entropy_quantile=0.8,
    clip_low_entropy=0.2,
    clip_high_entropy=0.4,
    dual_clip=3.0,
):
    """GRPO with the weight 1/r on positive tokens, the hard clip kept, extremes capped softly.

        eps = clip_low_entropy where H_bt <= its row's quantile of H, else clip_high_entropy
        A < 0:  n = max(r, 1 - eps),  x = -A n                      if n <= dual_clip
        A >= 0: p = min(r, 1 + eps),  x = -A p / stop_grad(p)^2     if 1/p <= dual_clip
                                      x = -A dual_clip logprobs     beyond, for both signs
        loss = sum m x / sum m

    So the gradient is -A r or -A / r inside, 0 where the clip acts, and -A dual_clip beyond. r is
    the token ratio, log-ratio clamped to +-20. The value jumps at the dual clip, the gradient does
    not. The published script adds a KL term (k3, 0.001): compose with `kl_penalty` for it.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      entropy: [B,T] of the policy, nats; constant.
      entropy_quantile: share of a row's tokens that count as low-entropy.
      clip_low_entropy, clip_high_entropy: half-width of the ratio's window for the two kinds.
      dual_clip: largest weight; None: none.

    Returns:
      (loss, metrics).

    Reference: arXiv 2510.06062; the authors' code, where the mask called high_entropy is true on
    low-entropy tokens.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask)
    low_entropy = entropy <= quantile(entropy, mask, entropy_quantile)
    eps = jnp.where(low_entropy, clip_low_entropy, clip_high_entropy)
    negative = advantages < 0
    held = jax.lax.stop_gradient(clip_ratio(ratio, eps, eps))
    clipped = clipped_side(ratio, advantages, eps, eps)
    kept = jnp.where(clipped, held, ratio)
    value = jax.lax.stop_gradient(kept)
    inside = jnp.where(negative, kept, kept / value**2)
    weight = jnp.where(negative, value, 1 / value)
    capped = weight > (jnp.inf if dual_clip is None else dual_clip)
    soft = 0.0 if dual_clip is None else dual_clip * logprobs
    loss = -masked_mean(advantages * jnp.where(capped, soft, inside), mask)
    live = jnp.where(clipped, 0.0, weight if dual_clip is None else jnp.minimum(weight, dual_clip))
    metrics = {
        "weight_mean": masked_mean(live, mask),
        "dual_clip_fraction": masked_mean(capped.astype(mask.dtype), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, eps, eps),
    }
    return loss, metrics
