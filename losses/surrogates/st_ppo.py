"""ST-PPO: ratios per turn, updates scaled down by their clipping bias."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean, masked_sum
from losses.ops.options import check_option
from losses.ops.ratios import BOUND, bounded_exp, log_ratio
from losses.ops.surrogates import clip_metrics, clipped_side, clipped_surrogate, ratio_metrics
from losses.ops.turns import own_turn_mean


@paper(
    "st-ppo",
    kind="objective",
    base="ppo",
    title="ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents",
    arxiv="2511.20718",
    year=2025,
    metric="bias_norm_max",
)
def st_ppo_loss(
    logprobs,
    old_logprobs,
    mask,
    turn_ids,
    advantages,
    *,
    clip_low=0.2,
    clip_high=0.2,
    turn_level=True,
    bias_correction=True,
    scope="response",
):
    """The clipped surrogate on turn ratios, each response divided by the norm of what was clipped.

        w_bt = exp( mean of d over the valid tokens of t's turn ),   d = clip(log-ratio, -20, 20)
        x_bt = min( w A, clip(w, 1 - clip_low, 1 + clip_high) A )
        c_bt = w A where the clip is active, else 0
        n_b  = sqrt( sum_t m c_bt^2 )        scope="batch": one n over all rows
        loss = - mean_b stop_grad(1 / max(1, n_b)) (1/|m_b|) sum_t m x

    Tokens of a turn share the ratio; each is clipped by the sign of its own advantage. turn_level
    alone is Turn-PPO, bias_correction alone S-PPO. Composed, it takes group advantages (the paper's
    SO-GRPO); with a critic give it `advantage="gae"` and a value loss.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      turn_ids: [B,T] int, any values.
      clip_low, clip_high: the ratio's window; None: no bound.
      turn_level: False takes the token's own ratio.
      bias_correction: False leaves the scale at 1.
      scope: "response" or "batch".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown scope.

    Reference: arXiv 2511.20718. The exact normaliser could not be read: a norm in log-probability
    space with a floor of 1 stands for the norm of the bias's parameter gradient.
    """
    check_option("scope", scope, ("response", "batch"))
    d = log_ratio(logprobs, old_logprobs, mask).clip(-BOUND, BOUND)
    ratio = bounded_exp(own_turn_mean(d, turn_ids, mask) if turn_level else d)
    term = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    clipped = clipped_side(ratio, advantages, clip_low, clip_high)
    bias = jax.lax.stop_gradient(jnp.where(clipped, ratio * advantages, 0.0))
    axis = None if scope == "batch" else -1
    norm = jnp.broadcast_to(jnp.sqrt(masked_sum(bias**2, mask, axis=axis)), mask.shape[:1])
    scale = 1 / jnp.maximum(norm, 1.0) if bias_correction else jnp.ones_like(norm)
    metrics = {
        "bias_norm_mean": jnp.mean(norm),
        "bias_norm_max": jnp.max(norm),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return -jnp.mean(scale * masked_mean(term, mask, axis=-1)), metrics
