"""AOPD: policy gradient where the teacher agrees, imitation of its top tokens elsewhere."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.divergences import kl_terms, log_softmax, of_token
from losses.ops.masked import aggregate, masked_mean


def aopd_tokens(logits, teacher_logits, tokens, *, tau=0.0, top_k=10):
    """Loss of each position and whether it imitates, from logits [...,V] and tokens [...]."""
    student, teacher = log_softmax(logits), log_softmax(teacher_logits)
    own, others = of_token(student, tokens), of_token(teacher, tokens)
    own_value = jax.lax.stop_gradient(own)
    imitated = jnp.exp(others) - jnp.exp(own_value) <= tau

    k = min(top_k, teacher.shape[-1])
    best, at = jax.lax.top_k(teacher, k)
    imitation = jnp.sum(kl_terms(best, jnp.take_along_axis(student, at, axis=-1)), axis=-1) / k
    exploitation = -(others - own_value) * own
    return {
        "token_loss": jnp.where(imitated, imitation, exploitation),
        "imitated": imitated.astype(own.dtype),
    }


def aopd_mean(token_loss, imitated, mask):
    """Sequence mean of the token losses."""
    metrics = {"imitation_fraction": masked_mean(imitated, mask)}
    return aggregate(token_loss, mask, "sequence_mean"), metrics


@paper(
    "aopd",
    kind="objective",
    base="opd",
    title=(
        "Asymmetric On-Policy Distillation: Bridging Exploitation and Imitation at the Token Level"
    ),
    arxiv="2605.06387",
    year=2026,
    split=(aopd_tokens, aopd_mean),
    metric="imitation_fraction",
)
def aopd_loss(logits, teacher_logits, tokens, mask, *, tau=0.0, top_k=10):
    """Sampled-token distillation with its negative side replaced by a truncated forward KL.

        x_t, y_t = log p_S, log p_T of the sampled token;   A_t = stop_grad(y_t - x_t)
        G_t  = [ exp(y_t) - stop_grad(exp(x_t)) <= tau ]
        F_t  = (1/k) sum over the teacher's k most likely v of p_T(v) ( log p_T(v) - log p_S(v) )
        loss = mean_i ( sum_t m ( G F - (1 - G) A x ) / sum_t m )

    k = min(top_k, V), equal teacher logits: the lower index first. The truncated sum is not
    renormalised: it can be negative, and it pulls mass into the top k even at agreement.

    Args:
      logits, teacher_logits: [B,T,V].
      tokens: [B,T] int, sampled by the student.
      mask: [B,T].
      tau: bound on the difference of probabilities; 0 imitates on every non-positive advantage.
      top_k: of the teacher.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.06387, read through a reimplementation; top_k and 1/k are its.
    """
    return aopd_mean(mask=mask, **aopd_tokens(logits, teacher_logits, tokens, tau=tau, top_k=top_k))
