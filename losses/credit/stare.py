"""STARE: entropy held at a target by reweighting the most surprising tokens."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.options import check_option
from losses.ops.order import share, top
from losses.surrogates.dual_clip_ppo import dual_clip_loss

VARIANTS = ("O1", "C2")


def stare_controller(
    state, batch_entropy, *, target=0.3, adaptive=False, alpha=0.01, w_max=1.5, m_min=0.5
):
    """Next state of the entropy controller, once per step, before the update.

        gate_on = batch_entropy < target
        adaptive, with d = sign(target - batch_entropy):
          weight_pos <- clip(weight_pos + alpha d, 1, w_max)
          weight_neg <- clip(weight_neg - alpha d, m_min, 1)

    Args:
      state: dict of gate_on, weight_pos, weight_neg, the hyperparameters of `stare_loss`.
      batch_entropy: token mean of the rollout policy's entropy, nats. Not finite: no change.

    Returns:
      The new state.
    """
    new = {**state, "gate_on": batch_entropy < target}
    if adaptive:
        step = alpha * jnp.sign(target - batch_entropy)
        new["weight_pos"] = jnp.clip(state["weight_pos"] + step, 1.0, w_max)
        new["weight_neg"] = jnp.clip(state["weight_neg"] - step, m_min, 1.0)
    finite = jnp.isfinite(batch_entropy)
    return {name: jnp.where(finite, value, state[name]) for name, value in new.items()}


@paper(
    "stare",
    kind="objective",
    base="dapo",
    title="STARE: Surprisal-Guided Token-Level Advantage Reweighting for Policy Entropy Stability",
    arxiv="2606.19236",
    year=2026,
    metric="weight_mean",
)
def stare_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    gate_on=True,
    variant="O1",
    top_ratio=0.1,
    weight_pos=1.1,
    weight_neg=0.9,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=3.0,
):
    """Dual-clip DAPO with another weight on the most surprising tokens of either sign.

        L+   = the max(1, ceil(top_ratio |P|)) tokens of P = {A > 0} of largest -logprobs
        L-   = likewise in Q = {A < 0}
        w    = weight_pos on L+, weight_neg on L- ("C2" only), else 1;  all 1 when the gate is off
        loss = sum m w l / sum m,   l the dual-clip loss of the token

    Sets are drawn over the whole batch, from the current policy, constant; ties go to the earlier
    token in row-major order. Written with w on the advantage: l is homogeneous in it.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      gate_on: bool, may be traced; see `stare_controller`.
      variant: "O1" reweights positive tokens only, "C2" both signs.
      top_ratio: share of the tokens of a sign that is reweighted.
      weight_pos, weight_neg: > 0; may be traced.
      clip_low, clip_high: window of the ratio.
      dual_clip: bound where A < 0; None: none.

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown variant.

    Reference: arXiv 2606.19236. The authors draw the sets per micro-batch.
    """
    check_option("variant", variant, VARIANTS)
    surprisal = -jax.lax.stop_gradient(logprobs)

    def most_surprising(side):
        side = mask * side
        return top(surprisal, side, jnp.maximum(share(top_ratio, jnp.sum(side)), 1), axis=None)

    positive, negative = most_surprising(advantages > 0), most_surprising(advantages < 0)
    weight = jnp.where(positive > 0, weight_pos, 1.0)
    if variant == "C2":
        weight = jnp.where(negative > 0, weight_neg, weight)
    weight = jnp.where(gate_on, weight, 1.0)
    loss, metrics = dual_clip_loss(
        logprobs, old_logprobs, weight * advantages, mask, clip_low=clip_low,
        clip_high=clip_high, dual_clip=dual_clip,
    )  # fmt: skip
    return loss, {**metrics, "weight_mean": masked_mean(weight, mask)}
