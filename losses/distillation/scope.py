"""SCOPE: wrong rollouts distilled, right ones reinforced, each by its perplexity."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean, rows_to_tokens
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "scope",
    kind="objective",
    base="opd",
    title="SCOPE: Signal-Calibrated On-Policy Distillation Enhancement with Dual-Path Adaptive "
    "Weighting",
    arxiv="2604.10688",
    year=2026,
    metric="teacher_kl",
)
def scope_loss(
    logprobs,
    old_logprobs,
    teacher_logprobs,
    rewards,
    group_ids,
    mask,
    *,
    tau=1.0,
    student_power=1.0,
    teacher_power=-1.0,
    clip_low=0.2,
    clip_high=0.2,
):
    """Weighted likelihood on right rows plus weighted, clipped distillation on wrong ones.

        C, W = the group's rows with tokens and reward > 0, and the other ones with tokens
        w_i  = |C| softmax over C of ( student_power logPPL_S / tau )            i in C
        w_i  = |W| softmax over W of ( teacher_power logPPL_T / tau )            i in W
        A    = w (teacher_logprobs - old_logprobs) on W rows, 0 on C rows
        loss = - sum over C rows of w logprobs / (tokens of C rows)
               - sum m min( rho A, clip(rho, 1 - clip_low, 1 + clip_high) A ) / (all tokens)

    logPPL_S and logPPL_T are minus the row's mean old and teacher log-probability; weights are
    constant and average 1 in their set. rho = exp(logprobs - old_logprobs).

    Args:
      logprobs, old_logprobs, teacher_logprobs, mask: [B,T].
      rewards, group_ids: [B].
      tau: temperature of the weights.
      student_power, teacher_power: powers of the perplexities; both -1 are the released scripts.
      clip_low, clip_high: window of the ratio.

    Returns:
      (loss, metrics).

    Reference: arXiv 2604.10688. The release's student weights have the opposite sign of its
    documentation, which is followed.
    """
    usable = lengths(mask) > 0
    right = rewards > 0
    student = -masked_mean(old_logprobs, mask, -1)
    teacher = -masked_mean(teacher_logprobs, mask, -1)
    score = jnp.where(right, student_power * student, teacher_power * teacher) / tau
    side = 2 * group_ids + right
    size = groups.group_size(side, usable, score.dtype)
    log_weight = score - groups.group_logsumexp(score, side, usable)
    weight = size * jnp.exp(jnp.where(usable, log_weight, 0.0))
    weight = rows_to_tokens(weight, mask)

    on_right = mask * right[:, None]
    likelihood = -masked_mean(weight * logprobs, on_right)
    gap = log_ratio(teacher_logprobs, old_logprobs, mask)
    advantages = jnp.where(right[:, None], 0.0, weight * gap)
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    distillation = -masked_mean(clipped_surrogate(ratio, advantages, clip_low, clip_high), mask)
    metrics = {
        "likelihood_loss": jax.lax.stop_gradient(likelihood),
        "distillation_loss": jax.lax.stop_gradient(distillation),
        "teacher_kl": -masked_mean(gap, mask),
        "correct_fraction": masked_mean(on_right, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return likelihood + distillation, metrics
