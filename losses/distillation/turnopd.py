"""TurnOPD: the loss shared between turn depths, and how deep to roll out."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.options import check_option
from losses.ops.turns import slot_sum, slots


def is_probe(step, *, warmup=2, probe_every=8):
    """Whether the rollouts of a step run without a cap and move the controller."""
    return step < warmup or step % probe_every == 0


def depth_controller(
    state, turns_used, succeeded, *, max_depth, quantile=0.8, ema=0.3, min_seen=8, min_depth=2
):
    """Next state of the rollout depth controller, from the rollouts of a probe step.

        H_cov = quantile of the turns used by the successful rollouts (of all, if none succeeded)
        depth = H_cov at first, then (1 - ema) depth + ema H_cov
        cap   = clip(round(depth), min_depth, max_depth) once min_seen rollouts were seen

    Plain numbers, outside the compiled step; capped steps must not be fed.

    Args:
      state: dict of depth (None at first), cap (None: no cap) and seen (0 at first).
      turns_used, succeeded: sequences of equal length, one entry per rollout.
      max_depth: the environment's own limit.

    Returns:
      The new state.
    """
    chosen = [d for d, s in zip(turns_used, succeeded, strict=True) if s] or list(turns_used)
    covered = float(jnp.quantile(jnp.asarray(chosen, jnp.result_type(float)), quantile))
    depth = covered if state["depth"] is None else (1 - ema) * state["depth"] + ema * covered
    seen = state["seen"] + len(turns_used)
    cap = max(min_depth, min(round(depth), max_depth)) if seen >= min_seen else state["cap"]
    return {"depth": depth, "cap": cap, "seen": seen}


def effective_depth(turn_kl, survivors):
    """Survivor-weighted centroid of the per-turn KL, H_eff = sum k s_k KL_k / sum s_k KL_k.

    Args:
      turn_kl: [K] mean KL of each turn depth.
      survivors: [K] share of the probe rollouts that reach it.
    """
    weight = jnp.asarray(survivors) * jnp.asarray(turn_kl)
    depth = jnp.arange(1, weight.shape[0] + 1)
    total = jnp.sum(weight)
    return jnp.sum(depth * weight) / jnp.where(total != 0, total, 1.0)


@paper(
    "turnopd",
    kind="credit",
    base="opd",
    title="TurnOPD: Making On-Policy Distillation Turn-Aware for Efficient Long-Horizon Agent "
    "Training",
    arxiv="2607.05804",
    year=2026,
    stages={
        "advantage": "opd_advantage",
        "objective": ("dapo_loss", {"clip_low": 0.2, "clip_high": 0.2}),
    },
)
def turnopd_weights(advantages, mask, turn_ids, *, alpha=1.0, scope="batch"):
    """Distillation advantages, reweighted from equal tokens towards equal turn depths.

        b_k = (1 - alpha) n_k / N + alpha / D                 share of the loss of depth k
        out = A b_k N / n_k                                   on the n_k valid tokens of depth k

    N = sum_k n_k, D = number of depths with a valid token, over the scope; the weights sum to N.

    Args:
      advantages, mask: [B,T]; advantages are teacher - old log-probabilities.
      turn_ids: [B,T] int.
      alpha: in [0, 1], 0 leaves the advantages as they are; grows with training, may be traced.
      scope: "batch" pools depths over all rows, "sequence" takes each row on its own.

    Returns:
      advantages [B,T].

    Raises:
      ValueError: unknown scope.

    Reference: arXiv 2607.05804, sections 5.1 and 5.2, through a reimplementation; the schedule of
    alpha is assumed.
    """
    check_option("scope", scope, ("batch", "sequence"))
    shape = (1, -1) if scope == "batch" else mask.shape
    valid = mask.reshape(shape)
    slot = slots(turn_ids.reshape(shape), valid)
    n = slot_sum(jnp.ones_like(valid), slot, valid)
    total, depths = (jnp.sum(x, axis=1, keepdims=True) for x in (n, (n > 0).astype(n.dtype)))
    own = jnp.take_along_axis(n, slot, axis=1)
    equal = total / jnp.maximum(depths * own, 1)
    weight = (1 - alpha + alpha * equal).reshape(mask.shape)
    return select(advantages * weight, mask)
