"""The 80/20 rule: only the batch's most uncertain tokens receive a policy gradient."""

import jax.numpy as jnp

from losses.catalogue import nearest, paper
from losses.ops.masked import count, masked_mean, masked_sum
from losses.ops.order import share, top
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics

DENOMINATORS = ("selected", "all")


@paper(
    "high-entropy-tokens",
    kind="objective",
    base="dapo",
    title="Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement "
    "Learning for LLM Reasoning",
    arxiv="2506.01939",
    year=2025,
    gradients=("logprobs",),
    metric="kept_fraction",
)
def high_entropy_loss(
    logprobs,
    old_logprobs,
    advantages,
    entropy,
    mask,
    *,
    top_ratio=0.2,
    clip_low=0.2,
    clip_high=0.28,
    denominator="selected",
):
    """DAPO's loss on the share of the batch's tokens with the largest entropy.

        S    = the k valid tokens of largest entropy,  k = max(1, ceil(top_ratio n))
        loss = - sum_S min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) / k     "selected"
                                                                        / n     "all"

    n counts the batch's valid tokens. Selection is constant; ties go to the earlier position in
    row-major order. The log-ratio is clamped to +-20, as in DAPO.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      entropy: [B,T] of the current policy, nats; read as a constant.
      top_ratio: share of the tokens that train.
      clip_low, clip_high: the ratio's window is [1 - clip_low, 1 + clip_high].
      denominator: "selected" (the authors' code) or "all" (TRL).

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown denominator.

    Reference: Wang et al. 2025, arXiv 2506.01939.
    """
    if denominator not in DENOMINATORS:
        raise ValueError(
            f"Unknown denominator {denominator!r}.{nearest(denominator, DENOMINATORS)} "
            f"One of {', '.join(DENOMINATORS)}."
        )
    k = jnp.maximum(share(top_ratio, count(mask)), 1)
    chosen = top(entropy, mask, k, axis=None)
    ratio = token_ratio(logprobs, old_logprobs, mask)
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high)
    total = masked_sum(term, chosen)
    metrics = {
        "kept_fraction": masked_mean(chosen, mask),
        "kept_entropy": masked_mean(entropy, chosen),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, chosen, clip_low, clip_high),
    }
    return total / count(chosen if denominator == "selected" else mask), metrics
