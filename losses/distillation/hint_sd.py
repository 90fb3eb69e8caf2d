"""HINT-SD: self-distillation from hindsight feedback on the turns that caused the failure."""

import jax
import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.divergences import kl, log_softmax
from losses.ops.masked import masked_mean

TAIL_BOUND = -1e-7
"""Largest log-mass of the kept entries, so that the tail keeps a logarithm."""


def hint_sd_tokens(logits, teacher_logits, *, top_k=100, add_tail=True):
    """Divergence on the student's top entries, from logits [...,V] to {"divergence": [...]}."""
    student, teacher = log_softmax(logits), log_softmax(teacher_logits)
    if top_k is None:
        return {"divergence": kl(student, teacher)}
    _, at = jax.lax.top_k(jax.lax.stop_gradient(student), min(top_k, student.shape[-1]))
    reduced = (
        reduced_support(jnp.take_along_axis(log_p, at, axis=-1), add_tail)
        for log_p in (student, teacher)
    )
    return {"divergence": kl(*reduced)}


def reduced_support(kept, add_tail):
    """Log-probabilities of some entries, completed by one tail entry or renormalised."""
    total = jax.nn.logsumexp(kept, axis=-1, keepdims=True)
    if not add_tail:
        return kept - total
    bounded = jnp.where(total > TAIL_BOUND, TAIL_BOUND, total)
    return jnp.concatenate([kept, jnp.log(-jnp.expm1(bounded))], axis=-1)


def hint_sd_mean(divergence, mask, target_mask):
    """Mean over the chosen tokens of the batch."""
    chosen = mask * (target_mask > 0)
    loss = masked_mean(divergence, chosen)
    return loss, {
        "teacher_kl": jax.lax.stop_gradient(loss),
        "target_fraction": masked_mean(chosen, mask),
    }


@paper(
    "hint-sd",
    kind="objective",
    base="opd",
    title="HINT-SD: Targeted Hindsight Self-Distillation for Long-Horizon Agents",
    arxiv="2605.17873",
    year=2026,
    split=(hint_sd_tokens, hint_sd_mean),
    metric="target_fraction",
)
def hint_sd_loss(logits, teacher_logits, mask, target_mask: Tokens, *, top_k=100, add_tail=True):
    """Reverse KL to the feedback-conditioned teacher on chosen action tokens.

        top  = the student's top_k entries (no gradient through the choice)
        add_tail:  u = [ log p[top], log(1 - sum p[top]) ],   else  u = log p[top] renormalised
        d_t  = sum_v exp(u_S) (u_S - u_T)
        loss = sum mask target_mask d / max( sum mask target_mask, 1 )

    The log-mass of the kept entries is bounded by -1e-7 in the tail. Equal student logits: the
    lower index first. The mean is over tokens, so longer targets weigh more.

    Args:
      logits: [B,T,V] of the student.
      teacher_logits: [B,T,V] of the moving-average teacher with the feedback in its prompt.
      mask: [B,T].
      target_mask: [B,T] 1 on action tokens of the turns named in hindsight.
      top_k: entries kept, at most V; None: the full vocabulary, no tail.
      add_tail: keep the rest as one entry.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.17873, as released.
    """
    tokens = hint_sd_tokens(logits, teacher_logits, top_k=top_k, add_tail=add_tail)
    return hint_sd_mean(mask=mask, target_mask=target_mask, **tokens)
