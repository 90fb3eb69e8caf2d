"""LightningRL: right and fast, for decoders that emit several tokens per forward pass."""

import jax
import jax.numpy as jnp

from losses.arrays import Rows
from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean, rows_to_tokens
from losses.ops.ratios import bounded_exp, log_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics

LOG_BOUND = 10.0
SAME = 1e-6
"""Standard scores that spread by no more than this differ by rounding only."""


@paper(
    "lightningrl",
    kind="objective",
    base="grpo",
    title="LightningRL: Breaking the Accuracy-Parallelism Trade-off of Block-wise dLLMs via "
    "Reinforcement Learning",
    arxiv="2603.13319",
    year=2026,
    metric="nll",
)
def lightningrl_loss(
    logprobs,
    old_logprobs,
    ref_logprobs,
    mask,
    correct: Rows,
    tpf: Rows,
    group_ids,
    *,
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.01,
    nll_coef=0.1,
    tpf_threshold=0.01,
):
    """GRPO on accuracy and speed normalised apart, with a likelihood anchor on right responses.

        R_i = (correct_i - mean)/std + (tpf_i - mean)/std        within the group, population std
        dropped: groups with no right response, or max tpf - min tpf < tpf_threshold
        A_i = (R_i - mean) / max(std, 1e-8)                      over all kept rows, unbiased
        loss = mean_i ( (1/|y_i|) sum_t -min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) )
             + kl_coef mean_tokens k3 + nll_coef mean_tokens of right rows ( -logprobs )

    All three means are over kept rows (with tokens) and their tokens. r = exp of the log-ratio
    clipped to +-10; k3 = exp(clip(-d, -10, 10)) - 1 + d, d = logprobs - ref_logprobs. Scores that
    do not spread, and a single kept row, give 0; nothing kept: loss 0.

    Args:
      logprobs, old_logprobs, ref_logprobs, mask: [B,T].
      correct: [B] 1 or 0; 0 also within 5 tokens of the length limit.
      tpf: [B] tokens per forward pass of the decoder, 0 if unknown.
      group_ids: [B] int.
      clip_low, clip_high: window of the ratio.
      kl_coef, nll_coef: weights of the KL and likelihood terms.
      tpf_threshold: smallest spread in speed that a group must have.

    Returns:
      (loss, metrics).

    Reference: arXiv 2603.13319; SJTU-DENG-Lab/LightningRL. In the released pipeline the likelihood
    term covers rows of non-negative combined reward; the paper's rule, right rows, is used here.
    """
    score = group_score(correct, group_ids) + group_score(tpf, group_ids)
    spread = groups.group_max(tpf, group_ids) - groups.group_min(tpf, group_ids)
    keep = (groups.group_max(correct, group_ids) > 0) & (spread >= tpf_threshold)
    batch = jnp.zeros_like(group_ids)
    std = jnp.maximum(groups.group_std(score, batch, 1, keep), 1e-8)
    away = (score - groups.group_mean(score, batch, keep)) / std
    advantages = jnp.where(groups.all_equal(score, batch, keep, SAME), 0.0, away)

    kept = mask * keep[:, None]
    advantages = rows_to_tokens(advantages, kept)
    ratio = bounded_exp(log_ratio(logprobs, old_logprobs, kept), LOG_BOUND)
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high)
    rows = (lengths(kept) > 0).astype(mask.dtype)
    policy = masked_mean(masked_mean(term, kept, axis=1), rows)
    d = log_ratio(logprobs, ref_logprobs, kept)
    kl = masked_mean(bounded_exp(-d, LOG_BOUND) - 1 + d, kept)
    nll = -masked_mean(logprobs, kept * correct[:, None])
    loss = policy + kl_coef * kl + nll_coef * nll
    metrics = {
        "nll": nll,
        "kl": kl,
        "tokens_per_pass": jnp.mean(tpf),
        "kept_fraction": jnp.mean(keep.astype(mask.dtype)),
        "advantage_abs": masked_mean(jnp.abs(advantages), kept),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, kept, clip_low, clip_high),
    }
    return loss, jax.lax.stop_gradient(metrics)


def group_score(x, group_ids):
    """(x - mean) / std of the group, population std and nothing added; 0 where all are equal."""
    std = groups.group_std(x, group_ids, ddof=0)
    return groups.centred(x, group_ids) / jnp.where(std > 0, std, 1.0)
