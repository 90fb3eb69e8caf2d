"""SAPO (soft): a smooth gate on the ratio in place of the clip."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import ratio_metrics


@paper(
    "sapo-soft",
    kind="objective",
    title="Soft Adaptive Policy Optimization",
    arxiv="2511.20347",
    year=2025,
    metric="weight_mean",
)
def sapo_soft_loss(logprobs, old_logprobs, advantages, mask, *, tau_pos=1.0, tau_neg=1.05):
    """A sigmoid gate that fades a token's gradient as its ratio leaves 1.

        f(r; tau) = (4 / tau) sigmoid( tau (r - 1) ),   tau = tau_pos if A_it > 0 else tau_neg
        loss = - mean_i sum_t m_it f(r_it; tau_it) A_it / |y_i|

    The gradient's weight relative to REINFORCE is 4 p (1 - p) r with p = sigmoid(tau (r - 1)): 1 at
    r = 1, positive everywhere. r = exp(logprobs - old_logprobs), the log-ratio clamped to +-20.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      tau_pos, tau_neg: sharpness of the gate by the advantage's sign.

    Returns:
      (loss, metrics).

    Reference: arXiv 2511.20347; verl, TRL.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (ratio - 1))
    weight = 4 * gate * (1 - gate) * ratio
    metrics = {
        "weight_mean": masked_mean(jax.lax.stop_gradient(weight), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return -aggregate(4 / tau * gate * advantages, mask, "sequence_mean"), metrics
