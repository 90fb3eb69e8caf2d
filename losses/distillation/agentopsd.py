"""AgentOPSD: turns weighted by how far they moved a belief in success."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select, standardise
from losses.ops.ratios import log_ratio
from losses.ops.turns import slot_sum, slots, to_tokens


@paper(
    "agentopsd",
    kind="credit",
    base="grpo",
    title="AgentOPSD: Recursive Self-Distillation for Agentic Reinforcement Learning",
    arxiv="2608.05987",
    year=2026,
    stages={"objective": ("grpo_loss", {"beta": 0.01})},
)
def agentopsd_credit(
    advantages,
    old_logprobs,
    teacher_logprobs,
    mask,
    turn_ids,
    *,
    v0=0.5,
    lam=0.5,
    band=0.2,
    eps=1e-6,
):
    """Advantages times a weight from the change of belief that the skill's evidence makes, [B,T].

        e_k   = sum over the turn's tokens of (teacher_logprobs - old_logprobs)
        V_k   = sigmoid( logit(v0) + e_0 + ... + e_k ),   V_{-1} = v0
        q_k   = V_k - V_{k-1},   z_k = (q_k - mean q) / (std q + eps)     over the row's turns
        w_k   = clip( 1 + band sign(A) z_k, 1 - band, 1 + band )
        value = A ( (1 - lam) + lam w_k )

    v0 is clamped to [1e-4, 1 - 1e-4] and V to [1e-6, 1 - 1e-6]; the spread is the population's.
    One turn, or equal q: z = 0. Turns are taken in the order of their ids; one without valid tokens
    does not exist.

    Args:
      advantages, old_logprobs, mask: [B,T].
      teacher_logprobs: [B,T] of the same weights with the task's skill in the prompt.
      turn_ids: [B,T] int.
      v0: prior belief.
      lam: share of the advantage that is reweighted.
      band: largest relative change of the weight.
      eps: added to the standard deviation.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2608.05987; the mode that the authors' launch scripts select.
    """
    slot = slots(turn_ids, mask)
    exists = (slot_sum(jnp.ones_like(mask), slot, mask) > 0).astype(mask.dtype)
    evidence = slot_sum(log_ratio(teacher_logprobs, old_logprobs, mask), slot, mask)
    prior = jax.scipy.special.logit(jnp.clip(jnp.asarray(v0, mask.dtype), 1e-4, 1 - 1e-4))
    log_odds = prior + jnp.pad(jnp.cumsum(evidence, axis=1), ((0, 0), (1, 0)))
    belief = jnp.clip(jax.nn.sigmoid(log_odds), 1e-6, 1 - 1e-6)
    moved = belief[:, 1:] - belief[:, :-1]
    z = standardise(moved, exists, ddof=0, eps=eps, axis=-1)
    signed = jnp.sign(advantages) * to_tokens(z, slot, mask)
    weight = jnp.clip(1 + band * signed, 1 - band, 1 + band)
    return select(advantages * (1 - lam + lam * weight), mask)
