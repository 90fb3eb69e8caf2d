"""Group sequence policy optimisation."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import aggregate
from losses.ops.ratios import capped_exp, sequence_log_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics

LOG_CAP = 10.0


@paper(
    "gspo",
    kind="objective",
    title="Group Sequence Policy Optimization",
    arxiv="2507.18071",
    year=2025,
    metric="clip_fraction",
)
def gspo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=3e-4, clip_high=4e-4):
    """One length-normalised importance ratio per response, clipped as a whole.

        s_i  = exp( sum_t m_it (logprobs_it - old_logprobs_it) / |y_i| )
        loss = - mean_i (1/|y_i|) sum_t m_it min( s_i A_it, clip(s_i, ...) A_it )

    which is - mean_i min(s_i A_i, clip(s_i) A_i) when A is constant in the row. The gradient flows
    through s_i; log s_i is capped at 10. Fully masked rows add 0 and stay in the mean.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      clip_low, clip_high: the window of s, two orders below PPO's because s is a mean.

    Returns:
      (loss, metrics).

    Reference: Zheng et al. 2025, arXiv 2507.18071.
    """
    log_s = sequence_log_ratio(logprobs, old_logprobs, mask)
    return sequence_surrogate(
        capped_exp(log_s, LOG_CAP)[:, None], logprobs, old_logprobs, advantages, mask, clip_low,
        clip_high,
    )  # fmt: skip


def sequence_surrogate(ratio, logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    """Sequence mean of the clipped surrogate at a ratio that broadcasts to [B,T]."""
    ratio = jnp.broadcast_to(ratio, mask.shape)
    term = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    metrics = {
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return -aggregate(term, mask, "sequence_mean"), metrics
