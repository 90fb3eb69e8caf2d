"""VPPO: policy gradient on the tokens that depend on the evidence, more on responses that do."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.divergences import kl_estimate
from losses.ops.masked import lengths, masked_max, masked_mean, masked_min
from losses.ops.order import share, top
from losses.ops.ratios import BOUND, log_ratio
from losses.surrogates.dual_clip_ppo import dual_clip_loss


@paper(
    "vppo",
    kind="objective",
    base="dapo",
    title="Spotlight on Token Perception for Multimodal Reinforcement Learning",
    arxiv="2510.09285",
    year=2025,
    metric="selected_fraction",
)
def vppo_loss(
    logprobs,
    old_logprobs,
    counterfactual_logprobs: Tokens,
    advantages,
    mask,
    *,
    top_p=0.4,
    scale_min=0.9,
    entropy_coef=0.06,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=3.0,
):
    """Dual-clip DAPO on the most dependent tokens, scaled by the response's dependency.

        k    = clip( exp(d) - d - 1, 0, 10 ),  d = clip(counterfactual - old_logprobs, -20, 20)
        sel  = the ceil(top_p n_i) valid tokens of the response of largest k
        u_i  = minmax over responses of mean_t k
        c_i  = scale_min + (1 - scale_min) u_i / (mean u + 1e-8)
        loss = ( sum m sel l(c A) - entropy_coef sum m logprobs ) / sum m,   l the dual-clip loss

    mean c = 1; c = 1 where all mean k agree to 1e-6 or fewer than two responses have a valid token.
    The last term raises the log-probability of every sampled token, i.e. lowers entropy. Ties go to
    the earlier position; c and sel are constant. Written with sel on the advantage: l(0) = 0.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      counterfactual_logprobs: [B,T] the response under the old policy with damaged evidence.
      top_p: share of each response's tokens that is kept.
      scale_min: c of the least dependent response.
      entropy_coef: weight of the last term.
      clip_low, clip_high: window of the ratio.
      dual_clip: bound where A < 0; None: none.

    Returns:
      (loss, metrics).

    Reference: arXiv 2510.09285 and the authors' code, which takes min and max over the mini-batch
    and mean u over each micro-batch.
    """
    d = jnp.clip(log_ratio(old_logprobs, counterfactual_logprobs, mask), -BOUND, BOUND)
    k = jnp.clip(kl_estimate(d, "k3"), 0.0, 10.0)
    n = lengths(mask)
    selected = top(k, mask, share(top_p, n)[:, None])

    usable = (n > 0).astype(mask.dtype)
    s = masked_mean(k, mask, -1)
    low, high = masked_min(s, usable), masked_max(s, usable)
    flat = high - low <= 1e-6
    u = (s - low) / jnp.where(flat, 1.0, high - low)
    spread = (1 - scale_min) / (masked_mean(u, usable) + 1e-8)
    c = jnp.where(flat, 1.0, scale_min + u * spread)

    loss, metrics = dual_clip_loss(
        logprobs, old_logprobs, selected * c[:, None] * advantages, mask, clip_low=clip_low,
        clip_high=clip_high, dual_clip=dual_clip,
    )  # fmt: skip
    metrics["selected_fraction"] = masked_mean(selected, mask)
    return loss - entropy_coef * masked_mean(logprobs, mask), metrics
