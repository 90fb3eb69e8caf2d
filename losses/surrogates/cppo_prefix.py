"""CPPO (prefix): a trust region with a position-dependent limit and a running budget."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import lengths, masked_mean, select
from losses.ops.order import quantile as row_quantile
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import ratio_metrics


@paper(
    "cppo-prefix",
    kind="objective",
    base="grpo",
    title="Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning",
    arxiv="2606.10968",
    year=2026,
    metric="kept_fraction",
)
def cppo_prefix_loss(
    logprobs,
    sampler_logprobs,
    mask,
    advantages,
    *,
    delta=0.15,
    w_min=0.8,
    delta_b=0.02,
    quantile=0.9,
    budget_scale=1.0,
):
    """Importance-weighted policy gradient on the tokens that a cumulative budget keeps.

        D_t = | exp(logprobs) - exp(sampler_logprobs) |,   w_t = 1 - (1 - w_min)(t - 1)/(L - 1)
        Z_t = w_t D_t,   S = sum_{j<t} Z_j,   W = sum_{j<t} w_j
        b   = clip(budget_scale quantile(D_1..D_L), delta_b, 2 delta_b)
        keep_t = A_t (r_t - 1) <= 0  or  Z_t <= min(delta, delta + b W - S)
        loss = - sum m keep r A / sum m

    t = 1..L counts the row's valid tokens; the anchor of r (log-ratio clamped to +-20) is the
    sampler. keep is constant, kept tokens are not clipped, dropped ones stay in the denominator. S
    runs over dropped tokens too.

    Args:
      logprobs, sampler_logprobs, mask, advantages: [B,T].
      delta: limit on the weighted probability change of a token.
      w_min: weight of the last position; the first has 1.
      delta_b: floor of the budget per position; its ceiling is twice that.
      quantile, budget_scale: the budget between them, from the row's own D.

    Returns:
      (loss, metrics).

    Reference: arXiv 2606.10968. D is the binary total variation of public re-implementations; the
    paper's experiments take it over the 20 likeliest tokens.
    """
    ratio = token_ratio(logprobs, sampler_logprobs, mask)
    change = jnp.abs(jnp.exp(jax.lax.stop_gradient(logprobs)) - jnp.exp(sampler_logprobs))
    change = select(change, mask)
    place = jnp.cumsum(mask > 0, axis=-1).astype(mask.dtype)
    last = jnp.maximum(lengths(mask)[:, None] - 1, 1)
    weight = select(1 - (1 - w_min) * (place - 1) / last, mask)
    spent = weight * change
    spent_before = jnp.cumsum(spent, axis=-1) - spent
    weight_before = jnp.cumsum(weight, axis=-1) - weight
    budget = jnp.clip(budget_scale * row_quantile(change, mask, quantile), delta_b, 2 * delta_b)
    limit = delta + jnp.minimum(budget * weight_before - spent_before, 0.0)
    keep = (advantages * (ratio - 1) <= 0) | (spent <= limit)
    metrics = {
        "kept_fraction": masked_mean(keep.astype(mask.dtype), mask),
        "tv_mean": masked_mean(change, mask),
        **ratio_metrics(logprobs, sampler_logprobs, mask),
    }
    return -masked_mean(jnp.where(keep, ratio, 0.0) * advantages, mask), metrics
