"""EPO: an entropy bonus that keeps each turn's entropy near its own history."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import nearest, paper
from losses.ops.masked import masked_mean
from losses.ops.turns import membership

PENALTIES = ("indicator", "hinge")


@paper(
    "epo",
    kind="regularizer",
    base="ppo",
    title="EPO: Entropy-regularized Policy Optimization for LLM Agents Reinforcement Learning",
    arxiv="2509.22576",
    year=2025,
    metric="entropy_penalty",
)
def epo_regularizer(
    entropy,
    entropy_history: Float[Array, "K"],
    mask,
    turn_ids,
    *,
    lam=0.001,
    smooth=1.0,
    alpha=0.1,
    k_low=0.8,
    k_high=1.2,
    weight=1.0,
    penalty="indicator",
):
    """Entropy bonus minus a penalty on entropies outside a band around the turn's history.

        Hb_it = entropy_history[turn_ids_it]           indices past the end read the last entry
        P_it  = 0 if k_low Hb < H_it < k_high Hb else alpha                      "indicator"
        P_it  = alpha ( (k_low Hb - H_it)+ + (H_it - k_high Hb)+ ) / Hb          "hinge"
        loss  = -lam ( mean H - smooth weight mean P )                  over the batch's tokens

    P = 0 where Hb = 0, a turn without a history. "indicator" (paper and code) has no gradient: the
    update is that of a plain entropy bonus, and smoothing shows in the value alone. "hinge" is a
    differentiable variant of ours.

    Args:
      entropy, mask: [B,T]; nats.
      entropy_history: [K] mean over earlier updates of the mean token entropy at each turn index
        (`updated_history`), 0 where there is none.
      turn_ids: [B,T] int.
      lam: weight of the whole term; smooth, weight: of the penalty (`smoothing_weight` is the
        code's schedule of weight; a number that may be traced).
      alpha: height of the penalty; k_low, k_high: the band.
      penalty: "indicator" or "hinge".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown penalty.

    Reference: arXiv 2509.22576 and its code.
    """
    if penalty not in PENALTIES:
        raise ValueError(
            f"Unknown penalty {penalty!r}.{nearest(penalty, PENALTIES)} "
            f"One of {', '.join(PENALTIES)}."
        )
    past = entropy_history[jnp.clip(turn_ids, 0, entropy_history.shape[0] - 1)]
    low, high = k_low * past, k_high * past
    known = past != 0
    inside = (entropy > low) & (entropy < high)
    if penalty == "indicator":
        outside = jnp.where(inside, 0.0, alpha)
    else:
        # Chosen by comparisons, not maximum(), so that a tie with a bound does not split gradients.
        gap = jnp.where(entropy < low, low - entropy, 0.0)
        gap = gap + jnp.where(entropy > high, entropy - high, 0.0)
        outside = alpha * gap / jnp.where(known, past, 1.0)
    outside = jnp.where(known, outside, 0.0)
    mean, cost = masked_mean(entropy, mask), masked_mean(outside, mask)
    in_band = masked_mean((inside | ~known).astype(mask.dtype), mask)
    metrics = {"entropy_penalty": jax.lax.stop_gradient(cost), "entropy_in_band": in_band}
    return -lam * (mean - smooth * weight * cost), metrics


def smoothing_weight(update, updates):
    """The code's schedule of `weight`, for update e of E.

    e <= E/2: 1 - 0.2 (1 - exp(-2 e / (E/2)));   later: 0.8 exp(-3 (e - E/2) / (E/2)).
    """
    half = updates / 2
    early = 1 - 0.2 * (1 - jnp.exp(-2 * update / half))
    late = 0.8 * jnp.exp(-3 * jnp.maximum(update - half, 0) / half)
    return jnp.where(update <= half, early, late)


def updated_history(entropy_history, reached, entropy, turn_ids, mask):
    """Takes one update's entropies into the running mean per turn index.

    Args:
      entropy_history: [K] mean over the updates so far that reached the index, 0 at first.
      reached: [K] number of those updates, 0 at first.
      entropy, turn_ids, mask: [B,T] of the update's rollouts.

    Returns:
      (entropy_history, reached) with this update; indices nobody reached stay as they are.
    """
    turns = entropy_history.shape[0]
    members = membership(jnp.clip(turn_ids, 0, turns - 1), mask, turns)
    n = jnp.sum(members, axis=(0, 1))
    present = masked_mean(entropy[..., None], members, axis=(0, 1))
    after = reached + (n > 0)
    moved = entropy_history + (present - entropy_history) / jnp.maximum(after, 1)
    return jnp.where(n > 0, moved, entropy_history), after
