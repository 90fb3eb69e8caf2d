"""Generalised knowledge distillation: from forward to reverse KL through the JSD."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.divergences import jensen_shannon_terms, kl_terms, log_softmax
from losses.ops.masked import masked_mean


def gkd_terms(student, teacher, beta):
    """Summands over the vocabulary of the divergence at `beta`, from log-probabilities."""
    if beta == 0:
        return kl_terms(teacher, student)
    if beta == 1:
        return kl_terms(student, teacher)
    return jensen_shannon_terms(teacher, student, beta)


def gkd_tokens(logits, teacher_logits, *, beta=0.5, temperature=1.0):
    """Divergence of each position, from logits [...,V] to {"divergence": [...]}."""
    student, teacher = log_softmax(logits, temperature), log_softmax(teacher_logits, temperature)
    return {"divergence": jnp.sum(gkd_terms(student, teacher, beta), axis=-1)}


def divergence_mean(divergence, mask):
    """Mean divergence over the valid tokens of the batch."""
    loss = masked_mean(divergence, mask)
    return loss, {"teacher_divergence": jax.lax.stop_gradient(loss)}


@paper(
    "gkd",
    kind="objective",
    title="On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes (GKD)",
    arxiv="2306.13649",
    year=2023,
    split=(gkd_tokens, divergence_mean),
    metric="teacher_divergence",
)
def gkd_loss(logits, teacher_logits, mask, *, beta=0.5, temperature=1.0):
    """Generalised Jensen-Shannon divergence between teacher P and student Q.

        M = beta P + (1 - beta) Q
        0 < beta < 1:  d_it = beta KL(P || M) + (1 - beta) KL(Q || M)
        beta = 0:      d_it = KL(P || Q)          beta = 1:  d_it = KL(Q || P)
        loss = sum_it m_it d_it / sum_it m_it

    Differentiated through Q and M. The JSD tends to 0 at both ends, so the two KLs are special
    cases, not limits. No factor temperature^2. The share of on-policy batches (the paper's lambda)
    belongs to the data, not to the loss.

    Args:
      logits, teacher_logits: [B,T,V]; position t predicts response token t.
      mask: [B,T].
      beta: weight of the teacher in M, in [0, 1].
      temperature: divides both logits.

    Returns:
      (loss, metrics).

    Reference: Agarwal et al. 2023, arXiv 2306.13649; TRL, whose "batchmean" is the token mean.
    """
    tokens = gkd_tokens(logits, teacher_logits, beta=beta, temperature=temperature)
    return divergence_mean(mask=mask, **tokens)
