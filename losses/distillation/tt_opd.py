"""TT-OPD: every turn, cut to its first tokens, held to an outcome-aware copy of the policy."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.distillation.opd_full import opd_full_tokens
from losses.ops.masked import masked_mean
from losses.ops.turns import first_of_turn, own_turn_mean, same_turn


def phased_out(step, *, kl_coef=0.1, start=20, end=40):
    """Weight of the regulariser at a step: kl_coef until `start`, then linearly to 0 at `end`."""
    return kl_coef * jnp.clip((end - step) / (end - start), 0.0, 1.0)


def tt_opd_mean(divergence, mask, turn_ids, *, kl_coef=0.1, max_tokens_per_turn=512):
    """Mean over rows of the mean over turns of the mean over each turn's first tokens."""
    at = jnp.arange(mask.shape[1])
    place = jnp.sum(same_turn(turn_ids, mask) & (at[:, None] > at[None, :]), axis=-1)
    kept = mask * (place < max_tokens_per_turn)
    per_turn = own_turn_mean(divergence, turn_ids, kept)
    mean = jnp.mean(masked_mean(per_turn, first_of_turn(turn_ids, mask), -1))
    metrics = {
        "teacher_kl": jax.lax.stop_gradient(mean),
        "kept_fraction": masked_mean(kept, mask),
    }
    return kl_coef * mean, metrics


@paper(
    "tt-opd",
    kind="regularizer",
    base="grpo",
    title="Healthcare AI GYM for Medical Agents (Turn-level Truncated On-Policy Distillation)",
    arxiv="2605.02943",
    year=2026,
    split=(opd_full_tokens, tt_opd_mean),
    metric="teacher_kl",
)
def tt_opd_regularizer(
    logits, teacher_logits, mask, turn_ids, *, kl_coef=0.1, max_tokens_per_turn=512
):
    """Reverse KL to the moving-average teacher, every turn of a row weighing the same.

        d_t  = KL(student || teacher),   u_ik = mean of d over the turn's first valid tokens
        v_i  = mean over the row's turns of u_ik,   loss = kl_coef mean_i v_i

    A turn gains no weight by growing, in the mean or beyond the cut. Unmasked positions do not use
    up the cut; rows without tokens stay in the count.

    Args:
      logits: [B,T,V] of the policy.
      teacher_logits: [B,T,V] of the moving average on the same tokens, with a hint of the outcome
        in its prompt.
      mask: [B,T].
      turn_ids: [B,T] int.
      kl_coef: weight, may be traced; it is to fall to 0 early in training (`phased_out`).
      max_tokens_per_turn: the cut.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.02943, from a project page: what is truncated, the weight and the average
    over turns are assumed.
    """
    return tt_opd_mean(
        mask=mask,
        turn_ids=turn_ids,
        kl_coef=kl_coef,
        max_tokens_per_turn=max_tokens_per_turn,
        **opd_full_tokens(logits, teacher_logits),
    )
