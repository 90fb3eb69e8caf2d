"""MTP-OCC: a policy loss for the multi-token-prediction head, its weight set at every step."""

import jax
import jax.numpy as jnp

from losses.arrays import Tokens
from losses.baselines.dapo import dapo_loss
from losses.catalogue import paper
from losses.ops.masked import masked_sum, select


@paper(
    "mtp-occ",
    kind="objective",
    base="dapo",
    title="Joint Training of Multi-Token Prediction in Reinforcement Learning via Optimal "
    "Coefficient Calibration",
    arxiv="2605.28184",
    year=2026,
    gradients=("logprobs", "mtp_logprobs"),
    metric="coef",
)
def mtp_occ_loss(
    logprobs,
    old_logprobs,
    mtp_logprobs: Tokens,
    old_mtp_logprobs: Tokens,
    advantages,
    mask,
    mtp_mask: Tokens,
    *,
    coef_scale=0.3,
    coef_max=0.5,
    ema=0.0,
    eps=1e-8,
    clip_low=0.2,
    clip_high=0.28,
    prev_coef=0.0,
):
    """DAPO on the main head plus c times DAPO on the MTP head.

        p = exp(logprobs), q = exp(mtp_logprobs), m2 = mask mtp_mask                    constant
        ratio = sum m2 A^2 (1-p)(1-q) / ( sum m2 A^2 (1-q)^2 + eps )
        c     = ema prev_coef + (1 - ema) clip(coef_scale ratio, 0, coef_max)           constant
        loss  = DAPO(logprobs, old_logprobs, mask) + c DAPO(mtp_logprobs, old_mtp_logprobs, m2)

    A step along g + c m changes the objective most at c = <g,m> / (L eta |m|^2); in the sampled
    token's logit the two gradients are A(1-p) and A(1-q), and coef_scale stands for 1/(L eta).

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      mtp_logprobs: [B,T] the MTP head's log-probability of token t from the trunk state two
        positions before it, differentiable; old_mtp_logprobs: the same under the rollout policy.
      mtp_mask: [B,T] 1 where that prediction exists.
      coef_scale, coef_max, ema, eps: of the coefficient.
      clip_low, clip_high: the window of both ratios.
      prev_coef: the coefficient of the step before, a number that may be traced.

    Returns:
      (loss, metrics); metrics["coef"] is c, the next step's prev_coef.

    Reference: arXiv 2605.28184, from the abstract; the log-probability proxy, its scale, smoothing
    and bounds are derived here, one extra token of depth is assumed.
    """
    both = mask * (mtp_mask > 0)
    # A token of probability 1 has no gradient: 1 - p without the cancellation of 1 - exp.
    main_miss, mtp_miss = (-jnp.expm1(select(x, both)) for x in (logprobs, mtp_logprobs))
    weight = advantages**2 * mtp_miss
    correlation = masked_sum(weight * main_miss, both)
    ratio = correlation / (masked_sum(weight * mtp_miss, both) + eps)
    now = jnp.clip(coef_scale * ratio, 0.0, coef_max)
    coef = jax.lax.stop_gradient(ema * prev_coef + (1 - ema) * now)
    window = {"clip_low": clip_low, "clip_high": clip_high}
    loss, metrics = dapo_loss(logprobs, old_logprobs, advantages, mask, **window)
    head, logged = dapo_loss(mtp_logprobs, old_mtp_logprobs, advantages, both, **window)
    logged = {f"mtp_{name}": value for name, value in logged.items()}
    return loss + coef * head, {**metrics, **logged, "coef": coef}
