"""SEED: self-distillation from skills that the trained policy writes itself."""

import jax

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.distillation.sdar import sdar_loss
from losses.ops.masked import masked_mean
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "seed-opd",
    kind="objective",
    base="grpo",
    title="SEED: Self-Evolving On-Policy Distillation for Agentic Reinforcement Learning",
    arxiv="2607.14777",
    year=2026,
    metric="gate_mean",
)
def seed_opd_loss(
    logprobs,
    old_logprobs,
    teacher_logprobs,
    advantages,
    skill_mask: Tokens,
    mask,
    *,
    coef=0.01,
    gate_beta=5.0,
    clip_low=0.2,
    clip_high=0.2,
):
    """The clipped token mean plus SDAR's gated term on the tokens that have a skill.

        loss = - sum m min( rho A, clip(rho, 1 - clip_low, 1 + clip_high) A ) / sum m
               + coef sum m s gate (teacher_logprobs - logprobs) / sum m s,    s = skill_mask

    gate = sigmoid(gate_beta (teacher_logprobs - logprobs)), constant. The second term has a
    denominator of its own and is 0 where no token has a skill.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      teacher_logprobs: [B,T] under the policy before the update with the hindsight skill inserted.
      skill_mask: [B,T] 1 on tokens of turns for which a usable skill exists.
      coef, gate_beta: as in `sdar_loss`.
      clip_low, clip_high: window of the ratio.

    Returns:
      (loss, metrics).

    Reference: arXiv 2607.14777, through a reproduction; that the second term is SDAR's is inferred.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    surrogate = -masked_mean(clipped_surrogate(ratio, advantages, clip_low, clip_high), mask)
    skilled = mask * (skill_mask > 0)
    distil, metrics = sdar_loss(logprobs, teacher_logprobs, skilled, coef=coef, gate_beta=gate_beta)
    metrics = {
        **metrics,
        "distillation_loss": jax.lax.stop_gradient(distil),
        "skill_fraction": masked_mean(skilled, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return surrogate + distil, metrics
