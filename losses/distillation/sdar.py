"""SDAR: self-distillation from a skill-conditioned copy, gated by its endorsement."""

import jax

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import log_ratio


def gated_distillation(logprobs, teacher_logprobs, mask, gate):
    """Token mean of gate (teacher_logprobs - logprobs), the gate constant, and its metrics."""
    gate = jax.lax.stop_gradient(gate)
    loss = masked_mean(gate * log_ratio(teacher_logprobs, logprobs, mask), mask)
    return loss, {
        "gate_mean": masked_mean(gate, mask),
        "endorsed_fraction": masked_mean((gate > 0.5).astype(mask.dtype), mask),
    }


@paper(
    "sdar",
    kind="regularizer",
    base="grpo",
    title="Self-Distilled Agentic Reinforcement Learning",
    arxiv="2605.15155",
    year=2026,
    stages={"objective": ("grpo_loss", {"beta": 0.01})},
    metric="gate_mean",
)
def sdar_loss(logprobs, teacher_logprobs, mask, *, coef=0.01, gate_beta=5.0):
    """Likelihood of the policy's own tokens, weighted by a gate on the teacher's gap.

        gate_t = sigmoid( gate_beta (teacher_logprobs_t - stop_grad(logprobs_t)) )       constant
        loss   = coef sum m gate (teacher_logprobs - logprobs) / sum m

    The gradient is -coef gate_t / sum m on every token: towards the sampled token whatever the
    sign of the gap. The value is no divergence and may be negative.

    Args:
      logprobs, mask: [B,T].
      teacher_logprobs: [B,T] of the same tokens and weights, with a skill in the prompt.
      coef: weight.
      gate_beta: steepness of the gate.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.15155; authors' loss and launch scripts.
    """
    gap = jax.lax.stop_gradient(log_ratio(teacher_logprobs, logprobs, mask))
    gate = jax.nn.sigmoid(gate_beta * gap)
    loss, metrics = gated_distillation(logprobs, teacher_logprobs, mask, gate)
    return coef * loss, metrics
