"""StepOPSD: advantage shifted within a step by a hindsight teacher, its budget kept."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.ratios import log_ratio
from losses.ops.turns import own_turn_mean


@paper(
    "stepopsd",
    kind="credit",
    base="grpo",
    title="StepOPSD: Step-Aware Online Preference Distillation for Agent Reinforcement Learning",
    arxiv="2605.27140",
    year=2026,
)
def stepopsd_credit(
    advantages, old_logprobs, teacher_logprobs, mask, step_ids, *, alpha_clip=0.2, lambda_mix=0.5
):
    """Advantage times a mix of 1 and the teacher's weights, which average 1 in every step.

        g_t = clip( sign(A_t) (teacher_logprobs_t - old_logprobs_t), -alpha_clip, alpha_clip )
        v_t = exp(g_t) / mean of exp(g) over the step's valid tokens
        out = A_t ( 1 - lambda_mix + lambda_mix v_t )

    The sign of A is kept. A step of one token has v = 1.

    Args:
      advantages, old_logprobs, mask: [B,T].
      teacher_logprobs: [B,T] of the same tokens with hindsight in the prompt.
      step_ids: [B,T] int.
      alpha_clip: bound on the gap, nats.
      lambda_mix: in [0, 1].

    Returns:
      advantages [B,T].

    Reference: arXiv 2605.27140, abstract only: the exponential weight, the place of the clip and
    both defaults are assumed.
    """
    gap = jnp.sign(advantages) * log_ratio(teacher_logprobs, old_logprobs, mask)
    weight = jnp.exp(jnp.clip(gap, -alpha_clip, alpha_clip))
    mean = own_turn_mean(weight, step_ids, mask)
    relative = weight / jnp.where(mask > 0, mean, 1.0)
    return select(advantages * (1 - lambda_mix + lambda_mix * relative), mask)
