"""DelTA: tokens weighted by how well their gradient tells good responses from bad ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops.masked import count, masked_sum, masked_var, select

FLOOR = 1e-8


@paper(
    "delta-credit",
    kind="credit",
    base="dapo",
    title="DelTA: Discriminative Token Credit Assignment for Reinforcement Learning from "
    "Verifiable Rewards",
    arxiv="2605.21467",
    year=2026,
)
def delta_advantage(
    advantages,
    old_logprobs,
    hidden: Float[Array, "B T D"],
    mask,
    *,
    k_refine=1,
    lam_min=0.8,
    lam_max=1.2,
):
    """Tokens closer to their own side's gradient centroid than to the other's count more, [B,T].

        v_it = (1 - exp(old_logprobs_it)) hidden_it         head gradient at the sampled token's row
        mu_s = sum_s |A| v / max(sum_s |A|, 1e-8)           s: valid tokens with A > 0, with A < 0
        d_it = |v_it - mu_other|^2 - |v_it - mu_own|^2
        g_s  = sqrt( max( var_s d, 1e-8 ) )                 plain population variance over side s
        k_refine times:  al = sigmoid(d / g_own);  mu_s from weights |A| al;  g_s from the old d;
                         then d from the new mu
        lam = lam_min + (lam_max - lam_min) sigmoid(d / g_own), lam_min where A = 0,
        rescaled to mean 1 over the batch's valid tokens;   out = m A lam

    Centroids run over the whole batch, all prompts together; both sides move at once. A side
    without tokens has centroid 0.

    Args:
      advantages, old_logprobs, mask: [B,T].
      hidden: [B,T,D] input of the output head where token t is predicted, under the old policy.
      k_refine: refinements, a static count.
      lam_min, lam_max: range of the raw weight.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2605.21467 and its code, where the temperature g lags the centroids by one
    refinement, as here. The code masks by attention, so that tool output would count; `mask` does.
    """
    scale = select(1 - jnp.exp(old_logprobs), mask)
    hidden = select(hidden, mask[..., None])
    sign = jnp.sign(advantages)
    sides = [select(mask, advantages), select(mask, -advantages)]

    def centroid(side, weight):
        weight = select(jnp.abs(advantages) * weight, side)
        total = jnp.einsum("bt,btd->d", weight * scale, hidden, precision="highest")
        return total / jnp.maximum(jnp.sum(weight), FLOOR)

    def margin(weight):
        # |v - mu_-|^2 - |v - mu_+|^2 = (mu_+ - mu_-) . (2 v - mu_+ - mu_-): one product a token,
        # and no difference of large squares.
        plus, minus = (centroid(side, weight) for side in sides)
        axis = plus - minus
        along = scale * jnp.einsum("btd,d->bt", hidden, axis, precision="highest")
        middle = jnp.dot(axis, plus + minus, precision="highest")
        return sign * (2 * along - middle)

    def spread(d):
        by_side = [jnp.sqrt(jnp.maximum(masked_var(d, side), FLOOR)) for side in sides]
        return jnp.where(sign > 0, *by_side)

    d = margin(jnp.ones_like(mask))
    g = spread(d)
    for _ in range(k_refine):
        alpha = jax.nn.sigmoid(d / g)
        g = spread(d)
        d = margin(alpha)
    weight = lam_min + (lam_max - lam_min) * jax.nn.sigmoid(d / g)
    weight = select(jnp.where(sign == 0, lam_min, weight), mask)
    total = masked_sum(weight, mask)
    return select(advantages * weight * count(mask) / jnp.where(total == 0, 1.0, total), mask)
