"""OmniOPD: distillation from a teacher without logits, by verifying chunks of the student."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from losses.catalogue import paper
from losses.ops.divergences import kl, log_softmax, of_token
from losses.ops.masked import aggregate, masked_mean, select
from losses.ops.turns import to_tokens, turn_count, turn_mean


def select_chunks(entropy, mask, *, n_chunks=4, chunk_size=16):
    """Chunks to be audited, at the student's most uncertain places, [B,T] int.

    n_chunks times the position of largest entropy (ties: the later one) whose chunk_size positions
    all lie in the row and are masked in, at least chunk_size away from the starts taken before.

    Args:
      entropy: [B,T] of the student's whole distribution.
      mask: [B,T].
      n_chunks, chunk_size: static.

    Returns:
      [B,T] index of the chunk that a position belongs to, in the order taken, -1 if none.
    """
    rows, length = mask.shape
    at = jnp.arange(length)
    seen = jnp.pad(jnp.cumsum(mask > 0, axis=1), ((0, 0), (1, 0)))
    end = jnp.minimum(at + chunk_size, length)
    free = seen[:, end] - seen[:, :-1] == chunk_size
    chunk_ids = jnp.full((rows, length), -1)
    for j in range(n_chunks):
        last = length - 1 - jnp.argmax(select(entropy, free, -jnp.inf)[:, ::-1], axis=1)
        distance = at[None] - last[:, None]
        some = jnp.any(free, axis=1, keepdims=True)
        chunk_ids = jnp.where(some & (distance >= 0) & (distance < chunk_size), j, chunk_ids)
        free = free & (jnp.abs(distance) >= chunk_size)
    return chunk_ids


def omniopd_tokens(logits, ref_logits, tokens):
    """Log-probability of the token and KL from the base model, from logits [...,V]."""
    student = log_softmax(logits)
    return {
        "logprobs": of_token(student, tokens),
        "divergence": kl(log_softmax(ref_logits), student),
    }


def omniopd_mean(
    logprobs, divergence, mask, chunk_ids, chunk_support, *, n_rollouts=8, alpha=1.0, beta=0.1
):
    """Sequence sum of the weighted log-probabilities of audited tokens and the anchor of others."""
    slots = chunk_support.shape[1]
    audited = mask * (chunk_ids >= 0) * (chunk_ids < slots)
    present = turn_count(chunk_ids, audited, slots)
    own = jnp.exp(turn_mean(jax.lax.stop_gradient(logprobs), chunk_ids, audited, slots))
    hat = select((chunk_support + alpha * own) / (n_rollouts + alpha), present)
    weight = to_tokens(hat, chunk_ids, audited)
    anchored = mask * (chunk_ids == -1)
    term = -weight * select(logprobs, audited) + beta * select(divergence, anchored)
    metrics = {
        "weight_mean": masked_mean(weight, audited),
        "audited_fraction": masked_mean(audited, mask),
        "ref_kl": masked_mean(jax.lax.stop_gradient(divergence), anchored),
    }
    return aggregate(term, mask, "sequence_sum"), metrics


@paper(
    "omniopd",
    kind="objective",
    base="opd",
    title="OmniOPD: Logit-Free On-Policy Distillation via Speculative Verification",
    arxiv="2606.01476",
    year=2026,
    split=(omniopd_tokens, omniopd_mean),
    metric="weight_mean",
)
def omniopd_loss(
    logits,
    ref_logits,
    tokens,
    mask,
    chunk_ids: Int[Array, "B T"],
    chunk_support: Float[Array, "B C"],
    *,
    n_rollouts=8,
    alpha=1.0,
    beta=0.1,
):
    """Chunks reinforced by how similar the teacher's continuations are; the rest held to the base.

        bar_c = exp( mean over the chunk's tokens of log p )                          constant
        hat_c = (chunk_support_c + alpha bar_c) / (n_rollouts + alpha)                constant
        loss  = mean_i ( - sum_c hat_c sum_{t in c} log p_t
                         + beta sum_{t in no chunk} KL(ref_t || p_t) )                token sums

    Rows without tokens stay in the mean; chunk slots without tokens are skipped.

    Args:
      logits, ref_logits: [B,T,V] of the student and of the base model.
      tokens: [B,T] int.
      mask: [B,T].
      chunk_ids: [B,T] int, see `select_chunks`; -1: no chunk.
      chunk_support: [B,C] sum over the continuations of their similarity in [0, 1] to the chunk.
      n_rollouts: continuations per chunk.
      alpha: weight of the student's own confidence as prior.
      beta: weight of the anchor.

    Returns:
      (loss, metrics).

    Reference: arXiv 2606.01476, read in a reimplementation; numbers of continuations and chunks
    are assumed, the mean over rows is its recommendation.
    """
    return omniopd_mean(
        mask=mask,
        chunk_ids=chunk_ids,
        chunk_support=chunk_support,
        n_rollouts=n_rollouts,
        alpha=alpha,
        beta=beta,
        **omniopd_tokens(logits, ref_logits, tokens),
    )
