"""LUSPO: GSPO with each response's term times its length."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import lengths, masked_mean, rows_to_tokens
from losses.ops.ratios import capped_exp, sequence_log_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics
from losses.surrogates.gspo import LOG_CAP


@paper(
    "luspo",
    kind="objective",
    base="gspo",
    title="Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length "
    "Variation in RLVR",
    arxiv="2602.05261",
    year=2026,
    metric="clip_fraction",
)
def luspo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=2e-3, clip_high=2.5e-3):
    """GSPO's clipped sequence term multiplied by the response's length.

        s_i  = exp( sum_t m_it (logprobs_it - old_logprobs_it) / |y_i| )       log s_i capped at 10
        loss = - mean_i |y_i| min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )

    Every token of an unclipped row has the gradient -s_i A_i / B, with no length in it. A_i is the
    row's mean advantage. Gradients grow with length: scale the learning rate.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      clip_low, clip_high: the window of s.

    Returns:
      (loss, metrics).

    Reference: arXiv 2602.05261; TRL.
    """
    s = capped_exp(sequence_log_ratio(logprobs, old_logprobs, mask), LOG_CAP)
    gain = masked_mean(advantages, mask, axis=-1)
    term = lengths(mask) * clipped_surrogate(s, gain, clip_low, clip_high)
    by_token = rows_to_tokens(gain, mask)
    metrics = {
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(s[:, None], by_token, mask, clip_low, clip_high),
    }
    return -jnp.mean(term), metrics
