"""TS-GRPO: token ratios on the plan, one sequence ratio on the answer."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import BOUND, bounded_exp, log_ratio
from losses.ops.surrogates import clipped_side, clipped_surrogate, ratio_metrics


@paper(
    "ts-grpo",
    kind="objective",
    base="grpo",
    title="Thinkquel: A Model Dedicated to Text-to-dbt Using Synthetic Data and a Span-Aware "
    "Objective",
    arxiv="2510.00186",
    year=2025,
    metric="answer_clip_fraction",
)
def ts_grpo_loss(
    logprobs,
    old_logprobs,
    mask,
    answer_mask: Tokens,
    advantages,
    *,
    clip_tok_low=0.2,
    clip_tok_high=0.2,
    clip_seq_low=3e-4,
    clip_seq_high=4e-4,
    answer_weight=1.0,
):
    """GRPO's token ratio in the planning span, GSPO's ratio over the answer span alone.

        s_b  = exp( mean of d over the row's answer tokens ),   d = clip(log-ratio, -20, 20)
        plan:    x = min( r A, clip(r, 1 - clip_tok_low, 1 + clip_tok_high) A ),   r = exp(d)
        answer:  x = answer_weight min( s A, clip(s, 1 - clip_seq_low, 1 + clip_seq_high) A )
        loss = - mean_b (1/|m_b|) sum_t m x

    s carries its gradient to every answer token and to no planning token; |m_b| counts both spans.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T]; advantages may differ between the spans.
      answer_mask: [B,T] 1 on tokens of the answer span.
      clip_tok_low, clip_tok_high, clip_seq_low, clip_seq_high: the two windows; None: no bound.
      answer_weight: weight of the answer's terms.

    Returns:
      (loss, metrics).

    Reference: arXiv 2510.00186, after the abstract and a summary; the common normaliser, the
    span's ratio and the windows are assumed.
    """
    answer = (mask > 0) & (answer_mask > 0)
    span = answer.astype(mask.dtype)
    d = log_ratio(logprobs, old_logprobs, mask).clip(-BOUND, BOUND)
    r = bounded_exp(d)
    s = jnp.broadcast_to(bounded_exp(masked_mean(d, span, -1, keepdims=True)), mask.shape)
    token, sequence = (clip_tok_low, clip_tok_high), (clip_seq_low, clip_seq_high)
    term = jnp.where(
        answer,
        answer_weight * clipped_surrogate(s, advantages, *sequence),
        clipped_surrogate(r, advantages, *token),
    )
    clipped = {
        "answer_clip_fraction": (clipped_side(s, advantages, *sequence), span),
        "clip_fraction": (clipped_side(r, advantages, *token), mask - span),
    }
    metrics = {
        "answer_fraction": masked_mean(span, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **{n: masked_mean(hit.astype(mask.dtype), over) for n, (hit, over) in clipped.items()},
    }
    return -aggregate(term, mask, "sequence_mean"), metrics
