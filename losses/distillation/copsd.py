"""COPSD: crosslingual self-distillation with every vocabulary entry's term capped."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.distillation.gkd import divergence_mean, gkd_terms
from losses.ops.divergences import log_softmax


def copsd_tokens(logits, teacher_logits, *, beta=0.0, clip=0.05, temperature=1.1):
    """Capped divergence of each position, from logits [...,V] to {"divergence": [...]}."""
    student, teacher = log_softmax(logits, temperature), log_softmax(teacher_logits, temperature)
    terms = gkd_terms(student, teacher, beta)
    if clip is not None:
        terms = jnp.where(terms > clip, clip, terms)
    return {"divergence": jnp.sum(terms, axis=-1)}


@paper(
    "copsd",
    kind="objective",
    base="opd",
    title="Crosslingual On-Policy Self-Distillation for Multilingual Reasoning",
    arxiv="2605.09548",
    year=2026,
    split=(copsd_tokens, divergence_mean),
    metric="teacher_divergence",
)
def copsd_loss(logits, teacher_logits, mask, *, beta=0.0, clip=0.05, temperature=1.1):
    """GKD's divergence to the same model under a privileged prompt, capped entry by entry.

        e_v  = min( term of entry v, clip )             forward KL at beta = 0: P (log P - log Q)
        loss = sum_it m_it sum_v e_v / sum_it m_it

    The terms are those of `gkd_loss` (P teacher, Q student; beta = 1 is the reverse KL, between
    them the JSD with its gradient through M). An entry above the cap has no gradient; negative
    terms are not bounded, so the capped sum can be negative.

    Args:
      logits: [B,T,V] of the student, which sees the problem in the rare language only.
      teacher_logits: [B,T,V] of the frozen start weights, which also see its translation and
        solution, on the student's tokens.
      mask: [B,T].
      beta: 0 (the paper's), 1, or between.
      clip: cap per position and entry; None: none.
      temperature: divides both logits; the one of sampling.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.09548. The option is described as a cap per token; the released function
    caps before the sum over the vocabulary, which is followed.
    """
    tokens = copsd_tokens(logits, teacher_logits, beta=beta, clip=clip, temperature=temperature)
    return divergence_mean(mask=mask, **tokens)
