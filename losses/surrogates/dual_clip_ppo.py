"""Dual-clip PPO: a bound on the loss of negative advantages."""

import jax

from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clip_metrics, dual_clipped_surrogate, ratio_metrics


@paper(
    "dual-clip-ppo",
    kind="objective",
    base="ppo",
    title="Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
    arxiv="1912.09729",
    year=2019,
    metric="dual_clip_fraction",
)
def dual_clip_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=3.0,
    aggregation="token_mean",
    max_length=None,
):
    """The clipped surrogate whose loss at A < 0 is bounded by dual_clip |A|.

        l_t    = max( -r A, -clip(r, 1 - clip_low, 1 + clip_high) A )
        loss_t = min( l_t, -dual_clip A ) if A < 0 else l_t
        loss   = agg(loss_t)

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      clip_low, clip_high: the ratio's window.
      dual_clip: > 1; None switches it off.
      aggregation: of the token terms; `max_length` is for "constant" only.

    Returns:
      (loss, metrics).

    Reference: Ye et al. 2019, arXiv 1912.09729.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask)
    term = dual_clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)
    beyond = (advantages < 0) & (ratio > (jax.numpy.inf if dual_clip is None else dual_clip))
    metrics = {
        "dual_clip_fraction": masked_mean(beyond.astype(mask.dtype), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return -aggregate(term, mask, aggregation, max_length), metrics
