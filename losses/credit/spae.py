"""SPAE: per-step potentials, probed along the reasoning, reshape the outcome advantage."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_max, masked_mean, masked_min, masked_var, select


def step_potential(acc, conf):
    """Potential of a probed step, 1.5 acc conf + 0.5 acc - conf, in [-1, 1] for both in [0, 1]."""
    return 1.5 * acc * conf + 0.5 * acc - conf


@paper(
    "spae",
    kind="advantage",
    base="dapo",
    title="Step Potential Advantage Estimation: Harnessing Intermediate Confidence and "
    "Correctness for Efficient Mathematical Reasoning",
    arxiv="2601.03823",
    year=2026,
)
def spae_advantage(
    rewards,
    group_ids,
    step_ids,
    step_potentials: Float[Array, "B K"],
    potential_mask: Float[Array, "B K"],
    mask,
    *,
    alpha=0.5,
    xi=0.5,
    eps_sat=0.9,
    eps=1e-8,
):
    """Outcome advantage, discounted after the answer is settled, plus a bonus for its jumps.

        f_ik = 1 - alpha (1 - exp(-C_ik)),  C_ik = number of probed steps j < k with Phi > eps_sat
        D_ik = Phi_ik - Phi_i,k-1 (0 at k = 0),  Dn = minmax(D),  g = exp(Dn) - mean exp(Dn)
        a_it = (R_i - group mean) f_i,k(t) + xi g_i,k(t)
        out  = (a - mean a) / (std a + eps)               over the batch's valid tokens, unbiased

    minmax and mean run over all probed steps of the batch. Tokens of steps that were not probed
    (the summary) count all saturated steps and get g = 0. Fewer than two valid tokens, or all a
    equal to 1e-6: zeros.

    Args:
      rewards, group_ids: [B].
      step_ids: [B,T] int.
      step_potentials: [B,K] Phi of `step_potential`.
      potential_mask: [B,K] 1 where the step exists and was probed; the ones form a prefix.
      mask: [B,T].
      alpha: largest discount of settled steps.
      xi: weight of the bonus.
      eps_sat: potential above which a step counts as settled.
      eps: added to the standard deviation.

    Returns:
      advantages [B,T].

    Reference: arXiv 2601.03823, from a secondary summary: the scope of minmax, D = 0 at the first
    step, the rule for the summary and the unbiased deviation are assumed.
    """
    phi = select(step_potentials, potential_mask)
    settled = ((phi > eps_sat) & (potential_mask > 0)).astype(mask.dtype)
    before = jnp.cumsum(settled, axis=1) - settled
    jump = jnp.concatenate([jnp.zeros_like(phi[:, :1]), phi[:, 1:] - phi[:, :-1]], axis=1)
    low, high = masked_min(jump, potential_mask), masked_max(jump, potential_mask)
    spread = jnp.where(high > low, high - low, 1.0)
    bonus = jnp.exp(jnp.where(high > low, select(jump - low, potential_mask) / spread, 0.0))
    bonus = bonus - masked_mean(bonus, potential_mask)

    steps = phi.shape[1]
    at = jnp.clip(step_ids, 0, steps - 1)
    probed = jnp.take_along_axis(potential_mask, at, axis=1) * (step_ids < steps)
    total = jnp.sum(settled, axis=1, keepdims=True)
    c = jnp.where(probed > 0, jnp.take_along_axis(before, at, axis=1), total)
    g = select(jnp.take_along_axis(bonus, at, axis=1), probed)

    f = 1 - alpha * (1 - jnp.exp(-c))
    a = groups.centred(rewards, group_ids)[:, None] * f + xi * g
    equal = masked_max(a, mask) - masked_min(a, mask) <= 1e-6
    std = jnp.sqrt(masked_var(a, mask, ddof=1))
    return select(jnp.where(equal, 0.0, (a - masked_mean(a, mask)) / (std + eps)), mask)
