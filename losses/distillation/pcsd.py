"""PCSD: self-distillation weighted by how persistently the teacher favoured the recent tokens."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.distillation.sdar import gated_distillation
from losses.ops.pools import rows_standardised
from losses.ops.ratios import log_ratio
from losses.ops.turns import same_turn


def persistent_support(z, turn_ids, mask, *, w_min, w_max, decay):
    """Decayed mean of z over an adaptive window of the turn, and its change from the last token.

    The window grows with the local noise |z_t - z_{t-1}|; earlier tokens are those of the same
    turn, masked positions between them stepped over. Returns (P, D), [B,T] each.
    """
    same = same_turn(turn_ids, mask)
    at = jnp.arange(mask.shape[1])
    place = jnp.sum(same & (at[:, None] > at[None, :]), axis=-1)
    back = place[:, :, None] - place[:, None, :]
    previous = same & (back == 1)
    first = place == 0

    def change(x):
        return jnp.where(first, 0.0, x - jnp.sum(jnp.where(previous, x[:, None, :], 0), axis=-1))

    noise = jnp.abs(change(z))
    window = w_min + jnp.floor((w_max - w_min) * noise / (1 + noise))
    inside = same & (back >= 0) & (back < window[..., None])
    weight = jnp.where(inside, jnp.power(decay, jnp.maximum(back, 0).astype(z.dtype)), 0.0)
    total = jnp.sum(weight, axis=-1)
    support = jnp.sum(weight * z[:, None, :], axis=-1) / jnp.where(total > 0, total, 1.0)
    return support, change(support)


@paper(
    "pcsd",
    kind="regularizer",
    base="grpo",
    title="PCSD: Persistent Consistency for Self-Distillation in Agentic Reinforcement Learning",
    arxiv="2608.01837",
    year=2026,
    stages={"objective": ("grpo_loss", {"beta": 0.01})},
    metric="gate_mean",
)
def pcsd_loss(
    logprobs,
    teacher_logprobs,
    mask,
    turn_ids,
    *,
    coef=0.01,
    gate_beta=2.0,
    w_min=2,
    w_max=8,
    decay=0.8,
    trend=0.5,
    eps=1e-6,
):
    """SDAR's loss with a gate on the persistent, relative support of the teacher.

        z_t = standardised teacher_logprobs - logprobs of the row (population std + eps)
        n_t = |z_t - z_{t-1}|,   W_t = w_min + floor( (w_max - w_min) n_t / (1 + n_t) )
        P_t = sum_{j < W_t} decay^j z_{t-j} / sum_{j < W_t} decay^j,   D_t = P_t - P_{t-1}
        w_t = sigmoid( gate_beta ( P_t - trend max(0, -D_t) ) )                       constant
        loss = coef sum m w (teacher_logprobs - logprobs) / sum m

    Earlier tokens are valid tokens of the same turn; the window ends at its first, where n and D
    are 0. A row with one token or equal gaps has w = 1/2.

    Args:
      logprobs, mask: [B,T].
      teacher_logprobs: [B,T] of the same tokens with a skill in the prompt.
      turn_ids: [B,T] int.
      coef: weight.
      gate_beta: steepness of the gate.
      w_min, w_max: bounds of the window, tokens.
      decay: of the support, per token.
      trend: attenuation where support falls.
      eps: added to the standard deviation.

    Returns:
      (loss, metrics).

    Reference: arXiv 2608.01837, abstract only: every formula and constant is assumed.
    """
    gap = jax.lax.stop_gradient(log_ratio(teacher_logprobs, logprobs, mask))
    z = rows_standardised(gap, mask, eps=eps)
    support, change = persistent_support(z, turn_ids, mask, w_min=w_min, w_max=w_max, decay=decay)
    gate = jax.nn.sigmoid(gate_beta * (support - trend * jnp.maximum(0.0, -change)))
    loss, metrics = gated_distillation(logprobs, teacher_logprobs, mask, gate)
    return coef * loss, metrics
