"""Group relative policy optimisation."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.divergences import kl_estimate
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import BOUND, log_ratio, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "grpo",
    kind="objective",
    title="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    arxiv="2402.03300",
    year=2024,
    when={"ref_logprobs": "beta"},
    metric="clip_fraction",
)
def grpo_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    ref_logprobs=None,
    *,
    clip_low=0.2,
    clip_high=0.2,
    beta=0.04,
    aggregation="sequence_mean",
    max_length=None,
):
    """PPO's clipped surrogate without a critic, plus a KL term to the reference.

        s_it = min( r_it A_it, clip(r_it, 1 - clip_low, 1 + clip_high) A_it )
        k3   = exp(d) - d - 1,   d = clip(ref_logprobs - logprobs, -20, 20)
        loss = mean_i ( sum_t m_it (-s_it + beta k3_it) / sum_t m_it )

    r = exp(logprobs - old_logprobs), the log-ratio clamped to +-20; A constant. k3 is neither
    clipped nor importance-weighted. A fully masked row adds 0 and stays in the count of rows.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T]; log-probabilities in nats.
      ref_logprobs: [B,T]; not read (and may be None) when beta = 0.
      clip_low, clip_high: the ratio's window is [1 - clip_low, 1 + clip_high].
      beta: weight of the KL term.
      aggregation: "sequence_mean" (the paper), "token_mean", "sequence_sum" or "constant".
      max_length: generation limit in tokens, for "constant" only.

    Returns:
      (loss, metrics).

    Reference: Shao et al. 2024, arXiv 2402.03300.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask)
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high)
    metrics = {
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    if beta:
        d = jnp.clip(log_ratio(logprobs, ref_logprobs, mask), -BOUND, BOUND)
        k3 = kl_estimate(d, "k3")
        term = term + beta * k3
        metrics["kl"] = masked_mean(jax.lax.stop_gradient(k3), mask)
    return aggregate(term, mask, aggregation, max_length), metrics
