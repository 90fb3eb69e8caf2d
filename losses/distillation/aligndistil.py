"""AlignDistil: preference alignment as distillation from an extrapolated teacher."""

import jax
import jax.numpy as jnp

from losses.arrays import Logits
from losses.catalogue import paper
from losses.ops.divergences import kl, log_softmax
from losses.ops.masked import aggregate, masked_mean, select


def aligndistil_tokens(
    logits, teacher_logits, reverse_logits, *, beta=0.1, scale=15.0, floor=1e-3, temperature=1.0
):
    """Weighted divergence of each position and its weight, from logits [...,V]."""
    if floor <= 0:
        raise ValueError(f"floor must be positive, it stands in a denominator; got {floor}.")
    gap = jax.nn.softmax(teacher_logits, axis=-1) - jax.nn.softmax(reverse_logits, axis=-1)
    weight = scale * jnp.sum(jnp.abs(gap), axis=-1) + floor
    target = teacher_logits + weight[..., None] * (teacher_logits - reverse_logits)
    divergence = kl(log_softmax(logits, temperature), log_softmax(target, temperature))
    return {"divergence": beta / weight * divergence, "extrapolation": weight}


def aligndistil_mean(divergence, extrapolation, mask):
    """Sequence mean of the weighted divergence."""
    loss = aggregate(divergence, mask, "sequence_mean")
    return loss, {
        "weight_mean": masked_mean(extrapolation, mask),
        "weighted_kl": jax.lax.stop_gradient(loss),
    }


@paper(
    "aligndistil",
    kind="objective",
    base="opd",
    title="AlignDistil: Token-Level Language Model Alignment as Adaptive Policy Distillation",
    arxiv="2503.02832",
    year=2025,
    split=(aligndistil_tokens, aligndistil_mean),
    metric="weight_mean",
)
def aligndistil_loss(
    logits,
    teacher_logits,
    reverse_logits: Logits,
    mask,
    *,
    beta=0.1,
    scale=15.0,
    floor=1e-3,
    temperature=1.0,
):
    """Reverse KL to logits extrapolated from a reversed DPO model beyond a DPO model.

        tv_t = sum_v | softmax(teacher_logits) - softmax(reverse_logits) |      in [0, 2]
        w_t  = scale tv_t + floor
        z_t  = teacher_logits + w_t (teacher_logits - reverse_logits)
        d_t  = (beta / w_t) KL( softmax(logits / temperature) || softmax(z / temperature) )
        loss = mean_i ( sum_t m d / sum_t m )

    w and z are constant; tv and w use temperature 1. Where the two models disagree most the target
    is the furthest away and weighs least.

    Args:
      logits: [B,T,V] of the policy.
      teacher_logits: [B,T,V] of a DPO model.
      reverse_logits: [B,T,V] of a DPO model trained with chosen and rejected swapped.
      mask: [B,T].
      beta: the one the DPO models were trained with.
      scale, floor: of the weight; floor > 0.
      temperature: of student and target.

    Returns:
      (loss, metrics).

    Raises:
      ValueError: floor is not positive.

    Reference: arXiv 2503.02832. The paper's total variation is half of tv; the code's is used.
    """
    tokens = aligndistil_tokens(
        logits,
        teacher_logits,
        select(reverse_logits, mask[..., None]),
        beta=beta,
        scale=scale,
        floor=floor,
        temperature=temperature,
    )
    return aligndistil_mean(mask=mask, **tokens)
