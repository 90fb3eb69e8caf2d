"""TCOD: on-policy distillation of agents, with a depth of trajectory that grows with training."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from losses.catalogue import paper
from losses.distillation.opd import opd_advantage
from losses.ops.options import check_option


@paper(
    "tcod",
    kind="advantage",
    base="ppo",
    title="TCOD: Exploring Temporal Curriculum in On-Policy Distillation for Multi-turn "
    "Autonomous Agents",
    arxiv="2604.24005",
    year=2026,
    when={"demo_turns": lambda settings: settings["order"] == "b2f"},
    stages={"objective": ("grpo_loss", {"beta": 0.0})},
)
def tcod_advantage(
    old_logprobs,
    teacher_logprobs,
    mask,
    turn_ids,
    demo_turns: Int[Array, "B"] = None,
    *,
    step=0,
    order="f2b",
    every=6,
    max_turns=30,
    kl_coef=1.0,
):
    """The token's gap to the teacher, on the turns the curriculum has reached.

        f2b: keep turns k < min( 1 + floor(step / every), max_turns )
        b2f: keep turns k >= max( 0, demo_turns_i - 1 - floor(step / every) )
        out = kl_coef (teacher_logprobs - old_logprobs)       on kept turns, else 0

    Args:
      old_logprobs, teacher_logprobs, mask: [B,T].
      turn_ids: [B,T] int, from 0.
      demo_turns: [B] int, actions in the demonstration of the row's task; read, and required, by
        "b2f" only.
      step: update in progress, from 0; may be traced.
      order: "f2b" from the front, "b2f" from the back.
      every: updates until one more turn is kept.
      max_turns: bound on the depth of "f2b".
      kl_coef: weight.

    Returns:
      advantages [B,T].

    Raises:
      ValueError: unknown order.

    Reference: arXiv 2604.24005 and the authors' workflows. They average over turns first, each
    turn being a row of its own; here the loss averages over the rows it is given.
    """
    check_option("order", order, ("f2b", "b2f"))
    widened = jnp.floor_divide(step, every)
    if order == "f2b":
        kept = turn_ids < jnp.minimum(1 + widened, max_turns)
    else:
        kept = turn_ids >= jnp.maximum(0, demo_turns - 1 - widened)[:, None]
    return opd_advantage(old_logprobs, teacher_logprobs, mask, kl_coef=kl_coef) * kept
