"""GDRO: a game over difficulty classes weights the advantages of the hardest ones up."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from losses.catalogue import paper
from losses.ops.masked import select


@paper(
    "gdro",
    kind="credit",
    base="grpo",
    title="Group Distributionally Robust Optimization-Driven Reinforcement Learning for LLM "
    "Reasoning",
    arxiv="2601.19280",
    year=2026,
    stages={"objective": ("grpo_loss", {"clip_high": 0.28, "beta": 0.001})},
)
def gdro_credit(
    advantages,
    mask,
    class_ids: Int[Array, "B"],
    class_scores: Float[Array, "C"],
    *,
    eta=0.65,
    gamma=0.01,
    max_weight=15.0,
):
    """Advantages times the weight of the response's difficulty class, [B,T].

        p_c = exp(eta score_c) / sum over the classes U of the batch
        w_c = min( (1 - gamma) p_c + gamma / |U|, max_weight )
        v_b = min( w_class(b) B / sum_b' w_class(b'), max_weight ),   out = m A v

    B counts every row. The authors' code keeps uniform sampling and weights advantages, as here;
    the abstract speaks of a sampler.

    Args:
      advantages, mask: [B,T].
      class_ids: [B] int in 0..C-1.
      class_scores: [C] running scores, kept by `gdro_update`.
      eta: rate of the multiplicative weights.
      gamma: share of uniform exploration.
      max_weight: cap of the weights, at least 1.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2601.19280; kishanpb/verl-gdro.
    """
    members = _members(class_ids, class_scores)
    present = jnp.any(members > 0, axis=0)
    p = jax.nn.softmax(jnp.where(present, eta * class_scores, -jnp.inf))
    w = jnp.minimum((1 - gamma) * p + gamma / jnp.sum(present), max_weight)
    v = jnp.sum(members * w, axis=1)
    v = jnp.minimum(v * v.shape[0] / jnp.sum(v), max_weight)
    return select(advantages * v[:, None], mask)


def gdro_update(class_scores, seen, row_losses, class_ids, *, beta=0.12):
    """Next scores of the classes, moving averages of their share-normalised losses.

        x_c = (mean of row_losses over class c) / (share of the batch's rows in c)
        score_c <- x_c at first sight, then (1 - beta) score_c + beta x_c; absent: unchanged

    Args:
      class_scores: [C].
      seen: [C] 1 for classes met before.
      row_losses: [B] mean over the response of max(-A r, -A clip(r)), A without class weights.
      class_ids: [B] int.
      beta: rate of the average.

    Returns:
      (class_scores [C], seen [C]).
    """
    members = _members(class_ids, class_scores)
    n = jnp.sum(members, axis=0)
    mean = row_losses @ members / jnp.maximum(n, 1)
    x = mean * members.shape[0] / jnp.maximum(n, 1)
    moved = jnp.where(seen > 0, (1 - beta) * class_scores + beta * x, x)
    return jnp.where(n > 0, moved, class_scores), jnp.where(n > 0, jnp.ones_like(seen), seen)


def difficulty_class(accuracy, previous=None, *, edges=(0.4, 0.75), hysteresis=0.03):
    """Difficulty class of each prompt, the number of edges at or below its accuracy, [P] int.

    A prompt moves up over an edge only at accuracy >= edge + hysteresis, and down only at
    accuracy <= edge - hysteresis.

    Args:
      accuracy: [P] share of the prompt's last visits (the paper: 50) on which any response was
        right, 0 before the first.
      previous: [P] int class so far; None: none yet.
      edges: ascending bounds of the classes.
      hysteresis: half-width of the band around an edge in which a prompt stays.
    """
    accuracy, bounds = jnp.asarray(accuracy)[:, None], jnp.asarray(edges)
    if previous is None:
        return jnp.sum(bounds <= accuracy, axis=1)
    surely_above = jnp.sum(bounds + hysteresis <= accuracy, axis=1)
    perhaps_above = jnp.sum(bounds - hysteresis < accuracy, axis=1)
    return jnp.clip(previous, surely_above, perhaps_above)


def _members(class_ids, class_scores):
    """[B,C] 1 where the row is of the class."""
    return jax.nn.one_hot(class_ids, class_scores.shape[0], dtype=class_scores.dtype)
