"""GRPO and on-policy distillation on the same rollouts."""

import jax

from losses.catalogue import paper
from losses.ops.divergences import kl, log_softmax, of_token
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


def dgrpo_tokens(logits, teacher_logits, tokens):
    """Log-probability of the token and reverse KL of each position, from logits [...,V]."""
    student = log_softmax(logits)
    return {
        "logprobs": of_token(student, tokens),
        "divergence": kl(student, log_softmax(teacher_logits)),
    }


def dgrpo_mean(
    logprobs,
    divergence,
    old_logprobs,
    advantages,
    mask,
    *,
    kl_coef=0.5,
    clip_low=0.2,
    clip_high=0.2,
):
    """Sequence mean of the clipped surrogate plus the weighted divergence."""
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    term = kl_coef * divergence - clipped_surrogate(ratio, advantages, clip_low, clip_high)
    metrics = {
        "teacher_kl": masked_mean(jax.lax.stop_gradient(divergence), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return aggregate(term, mask, "sequence_mean"), metrics


@paper(
    "dgrpo",
    kind="objective",
    base="grpo",
    title="Combining On-Policy Optimization and Distillation for Long-Context Reasoning",
    arxiv="2605.12227",
    year=2026,
    split=(dgrpo_tokens, dgrpo_mean),
    metric="teacher_kl",
)
def dgrpo_loss(
    logits,
    tokens,
    old_logprobs,
    teacher_logits,
    advantages,
    mask,
    *,
    kl_coef=0.5,
    clip_low=0.2,
    clip_high=0.2,
):
    """The clipped surrogate, with the teacher in the place of the reference.

        rho_t = exp( log_softmax(logits_t)[token] - old_logprobs_t )
        d_t   = KL( softmax(logits_t) || softmax(teacher_logits_t) )
        loss  = mean_i ( sum_t m ( - min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
                                   + kl_coef d ) / sum_t m )

    The divergence is exact, not importance-weighted and not clipped: groups without spread and
    clipped tokens still learn from the teacher.

    Args:
      logits, teacher_logits: [B,T,V].
      tokens: [B,T] int, the sampled tokens.
      old_logprobs, advantages, mask: [B,T].
      kl_coef: weight of the divergence; 0 is GRPO without KL.
      clip_low, clip_high: the ratio's window.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.12227, abstract only: direction, coefficient and place are assumptions.
    """
    statistics = dgrpo_tokens(logits, teacher_logits, tokens)
    return dgrpo_mean(
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        kl_coef=kl_coef,
        clip_low=clip_low,
        clip_high=clip_high,
        **statistics,
    )
