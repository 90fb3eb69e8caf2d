"""KL penalty from sampled tokens."""

import jax

from losses.catalogue import paper
from losses.ops.divergences import kl_estimate
from losses.ops.masked import aggregate
from losses.ops.ratios import log_ratio


@paper(
    "kl-estimators",
    kind="regularizer",
    base="grpo",
    title="Approximating KL Divergence (k1, k2, k3) and the bias of their gradients",
    year=2020,
    metric="kl_penalty",
    stages={"objective": ("grpo_loss", {"beta": 0.0})},
)
def kl_penalty(
    logprobs,
    ref_logprobs,
    mask,
    *,
    estimator="k3",
    kl_coef=1.0,
    straight_through=False,
    aggregation="token_mean",
    max_length=None,
):
    """kl_coef times an estimate of KL(pi || ref).

        d = logprobs - ref_logprobs;  k1 = d,  k2 = d^2/2,  k3 = exp(-d) - 1 + d,  abs = |d|
        loss = kl_coef agg(k)

    As losses their gradients estimate, in the mean over y ~ pi: k1 nothing at all, k2 the gradient
    of KL(pi || ref), k3 that of KL(ref || pi). `straight_through` keeps the estimator's value and
    takes k2's gradient. Nothing is clamped (verl clamps d and k3).

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      estimator: "k1", "k2", "k3" or "abs".
      kl_coef: weight.
      straight_through: value of `estimator`, gradient of k2.
      aggregation: of the token terms; `max_length` is for "constant" only.

    Returns:
      (loss, metrics).

    Reference: Schulman 2020 (post); verl.
    """
    d = log_ratio(logprobs, ref_logprobs, mask)
    k = kl_estimate(d, estimator)
    if straight_through:
        k2 = kl_estimate(d, "k2")
        k = k2 - jax.lax.stop_gradient(k2) + jax.lax.stop_gradient(k)
    mean = aggregate(k, mask, aggregation, max_length)
    return kl_coef * mean, {"kl_penalty": jax.lax.stop_gradient(mean)}
