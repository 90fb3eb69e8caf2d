"""On-policy distillation over the whole vocabulary."""

import jax

from losses.catalogue import paper
from losses.ops.divergences import kl, log_softmax
from losses.ops.masked import masked_mean


def opd_full_tokens(logits, teacher_logits, *, temperature=1.0, direction="reverse"):
    """Divergence of each position, from logits [...,V] to {"divergence": [...]}."""
    student = log_softmax(logits, temperature)
    teacher = log_softmax(teacher_logits, temperature)
    if direction == "reverse":
        return {"divergence": kl(student, teacher)}
    if direction == "forward":
        return {"divergence": kl(teacher, student)}
    raise ValueError(f"Unknown direction {direction!r}; one of reverse, forward.")


def opd_full_mean(divergence, mask):
    """Mean divergence over the valid tokens of the batch."""
    loss = masked_mean(divergence, mask)
    return loss, {"teacher_kl": jax.lax.stop_gradient(loss)}


@paper(
    "opd-full",
    kind="objective",
    title="On-Policy Distillation, full-distribution form (reverse KL over the vocabulary)",
    arxiv="2306.13649",
    year=2023,
    split=(opd_full_tokens, opd_full_mean),
    metric="teacher_kl",
)
def opd_full_loss(logits, teacher_logits, mask, *, temperature=1.0, direction="reverse"):
    """KL between student and teacher at every position of the student's own responses.

        reverse: k_it = KL(student || teacher),   forward: k_it = KL(teacher || student)
        loss = sum_it m_it k_it / sum_it m_it

    Differentiated through the student everywhere; teacher and visited states are constant. No
    factor temperature^2.

    Args:
      logits: [B,T,V] of the student; position t predicts response token t.
      teacher_logits: [B,T,V].
      mask: [B,T].
      temperature: divides both logits.
      direction: "reverse" or "forward".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown direction.

    Reference: Agarwal et al. 2023, arXiv 2306.13649; TRL.
    """
    tokens = opd_full_tokens(logits, teacher_logits, temperature=temperature, direction=direction)
    return opd_full_mean(mask=mask, **tokens)
