"""Video-KTR: GRPO on the tokens that need the evidence, its order, or are uncertain."""

import jax
import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.divergences import kl_estimate
from losses.ops.masked import masked_mean
from losses.ops.order import quantile
from losses.ops.ratios import log_ratio, with_value_of


@paper(
    "video-ktr",
    kind="objective",
    base="grpo",
    title="Video-KTR: Reinforcing Video Reasoning via Key Token Attribution",
    arxiv="2601.19686",
    year=2026,
    stages={"advantage": ("grpo_advantage", {"eps": 1e-4})},
    gradients=("logprobs",),
    metric="selected_fraction",
)
def video_ktr_loss(
    logprobs,
    ref_logprobs,
    masked_logprobs: Tokens,
    shuffled_logprobs: Tokens,
    entropy,
    advantages,
    mask,
    *,
    entropy_ratio=0.2,
    visual_ratio=0.2,
    temporal_ratio=0.2,
    beta=0.04,
):
    """On-policy GRPO with its KL term on a union of three token sets, nothing on the others.

        top(x, ratio) = valid tokens with x >= quantile(x over the batch's valid tokens, 1 - ratio)
        S    = top(entropy, entropy_ratio) or top(logprobs - masked_logprobs, visual_ratio)
               or top(logprobs - shuffled_logprobs, temporal_ratio)
        l    = - exp(logprobs - stop_grad(logprobs)) A + beta k3
        loss = mean over rows with a selected token of ( sum_t S l / sum_t S )

    k3 = exp(x) - x - 1, x = clip(ref_logprobs - logprobs, -10, 10). Scores are signed and constant;
    the quantile is linear, and an order statistic it falls on is selected. Nothing selected: 0.

    Args:
      logprobs, ref_logprobs, entropy, advantages, mask: [B,T]; entropy is read as a constant.
      masked_logprobs: [B,T] of the same response with the evidence blanked out.
      shuffled_logprobs: [B,T] with the evidence items in a random order.
      entropy_ratio, visual_ratio, temporal_ratio: share of the tokens in each set.
      beta: weight of the KL term.

    Returns:
      (loss, metrics).

    Reference: arXiv 2601.19686 and the authors' code, whose threshold is per device and whose rows
    without a selected token divide by zero.
    """
    held = jax.lax.stop_gradient(logprobs)

    def selected_by(score, ratio):
        return (mask > 0) & (score >= quantile(score, mask, 1 - ratio, axis=None))

    key = selected_by(entropy, entropy_ratio)
    key |= selected_by(log_ratio(held, masked_logprobs, mask), visual_ratio)
    key |= selected_by(log_ratio(held, shuffled_logprobs, mask), temporal_ratio)
    key = key.astype(mask.dtype)

    k3 = kl_estimate(jnp.clip(log_ratio(logprobs, ref_logprobs, mask), -10.0, 10.0), "k3")
    term = -with_value_of(jnp.ones_like(mask), logprobs) * advantages + beta * k3
    rows = jnp.any(key > 0, axis=1).astype(mask.dtype)
    metrics = {
        "selected_fraction": masked_mean(key, mask),
        "kl": masked_mean(jax.lax.stop_gradient(k3), mask),
    }
    return masked_mean(masked_mean(term, key, -1), rows), metrics
