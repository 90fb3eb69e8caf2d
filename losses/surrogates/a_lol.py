"""A-LoL: offline policy gradient on what beats the reference policy's own value."""

import jax
import jax.numpy as jnp

from losses.arrays import Rows
from losses.catalogue import paper
from losses.ops.masked import masked_mean, masked_sum
from losses.ops.options import check_option
from losses.ops.ratios import bounded_exp, log_ratio, sequence_log_ratio, token_ratio
from losses.ops.surrogates import clip_ratio

VARIANTS = ("a-lol", "a-lol-seq", "a-lol-ref-free", "a-lol-kl")


@paper(
    "a-lol",
    kind="objective",
    title="Leftover Lunch: Advantage-based Offline Reinforcement Learning for Language Models",
    arxiv="2305.14718",
    year=2023,
    metric="kept_fraction",
)
def alol_loss(
    logprobs,
    ref_logprobs,
    mask,
    rewards,
    prompt_values: Rows,
    *,
    variant="a-lol",
    clip_low=0.9,
    clip_high=0.9,
    beta=0.0,
):
    """The response as one action, its positive advantage over the prompt's value, a clipped weight.

        A_b = max(rewards_b - prompt_values_b, 0)
        D_b = sum_t m (logprobs - ref_logprobs),   nll_b = - sum_t m logprobs
        a-lol           loss = mean_b A_b nll_b clip(exp(D_b), 1 - clip_low, 1 + clip_high)
        a-lol-seq       the same with each token's own ratio as its weight
        a-lol-ref-free  loss = mean_b A_b nll_b
        a-lol-kl        loss = mean_b A_b nll_b + beta mean_b D_b

    The weight is constant, its log-ratio clamped to +-20 before exp. Rows that do not beat their
    value add 0 and count in B.

    Args:
      logprobs, ref_logprobs, mask: [B,T]; ref is the SFT policy from which training starts.
      rewards: [B].
      prompt_values: [B] value of the reference policy at the prompt.
      variant: one of the four.
      clip_low, clip_high: window of the weight; None: no bound on that side.
      beta: weight of D, read by "a-lol-kl" only.

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown variant.

    Reference: Baheti et al. 2023, arXiv 2305.14718; the code clamps the advantage at 0 besides
    dropping such data, and so does this.
    """
    check_option("variant", variant, VARIANTS)
    gain = jnp.maximum(rewards - prompt_values, 0.0)
    drift = sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=False)
    if variant == "a-lol":
        ratio = jnp.broadcast_to(bounded_exp(drift)[:, None], mask.shape)
    elif variant == "a-lol-seq":
        ratio = token_ratio(logprobs, ref_logprobs, mask)
    else:
        ratio = jnp.ones_like(logprobs)
    ratio = jax.lax.stop_gradient(ratio)
    weighted = variant in ("a-lol", "a-lol-seq")
    weight = clip_ratio(ratio, clip_low, clip_high) if weighted else ratio
    loss = -jnp.mean(gain * masked_sum(weight * logprobs, mask, axis=-1))
    if variant == "a-lol-kl":
        loss = loss + beta * jnp.mean(drift)
    metrics = {
        "kept_fraction": jnp.mean((gain > 0).astype(gain.dtype)),
        "weight_mean": masked_mean(weight, mask),
        "clip_fraction": masked_mean((weight != ratio).astype(mask.dtype), mask),
        "kl": masked_mean(jax.lax.stop_gradient(log_ratio(logprobs, ref_logprobs, mask)), mask),
    }
    return loss, metrics
