"""RLCSD: what a correct hint changes and wrong hints do not."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "rlcsd",
    kind="objective",
    base="grpo",
    title="RLCSD: Reinforcement Learning with Contrastive On-Policy Self-Distillation",
    arxiv="2606.11709",
    year=2026,
    metric="selected_fraction",
)
def rlcsd_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    teacher_logprobs,
    wrong_logprobs: Float[Array, "B W T"],
    wrong_mask: Float[Array, "B W"],
    *,
    tau=0.02,
    beta=1.0,
    lam=0.5,
    delta=0.02,
    eta=1.0,
    signal_min=-2.0,
    signal_max=2.0,
    clip_low=0.2,
    clip_high=0.2,
):
    """The clipped surrogate, with a contrastive term on the tokens that decide the answer.

        e    = teacher_logprobs - log mean_k exp(wrong_logprobs_k)             over existing hints
        r    = clip( beta lam tanh(e / tau), signal_min, signal_max ),   0 without a wrong hint
        sel  = |r| > delta
        A'   = A + r, held at 0 where it would change sign;  0 where A = 0
        loss = mean over the others of l(A) + eta mean over sel of l(A')
        l(A) = - min( rho A, clip(rho, 1 - clip_low, 1 + clip_high) A )

    rho = exp(logprobs - old_logprobs). The two means have their own denominators.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      teacher_logprobs: [B,T] under a snapshot whose prompt holds a correct solution.
      wrong_logprobs: [B,W,T] the same with each of up to W wrong solutions.
      wrong_mask: [B,W] 1 for wrong hints that exist; entries of others are not read.
      tau: softness of the sign of e.
      beta, lam: size of the signal.
      delta: signal above which a token is selected.
      eta: weight of the selected tokens.
      signal_min, signal_max: bounds of the signal.
      clip_low, clip_high: window of the ratio.

    Returns:
      (loss, metrics).

    Reference: arXiv 2606.11709; authors' policy loss and released configs, whose values differ
    from the function's own fallbacks.
    """
    hinted, valid = wrong_mask > 0, (mask > 0)[:, None, :]
    some = jnp.any(hinted, axis=1)
    # A missing hint has no share of the mixture; where there is none at all, or no token, r is 0
    # anyway and zeros keep the logarithm finite.
    absent = jnp.where(some[:, None, None] & valid, -jnp.inf, 0.0)
    terms = jnp.where(hinted[..., None] & valid, wrong_logprobs, absent)
    count = jnp.maximum(jnp.sum(hinted, axis=1), 1).astype(mask.dtype)
    mixture = jax.nn.logsumexp(terms, axis=1) - jnp.log(count)[:, None]
    r = jnp.clip(beta * lam * jnp.tanh((teacher_logprobs - mixture) / tau), signal_min, signal_max)
    r = jnp.where(some[:, None], r, 0.0)

    selected = mask * (jnp.abs(r) > delta)
    shifted = advantages + r
    shifted = jnp.where(
        advantages > 0,
        jnp.maximum(shifted, 0.0),
        jnp.where(advantages < 0, jnp.minimum(shifted, 0.0), 0.0),
    )
    contrasted = jnp.where(selected > 0, shifted, advantages)
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    term = -clipped_surrogate(ratio, contrasted, clip_low, clip_high)
    loss = masked_mean(term, mask - selected) + eta * masked_mean(term, selected)
    metrics = {
        "selected_fraction": masked_mean(selected, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, contrasted, mask, clip_low, clip_high),
    }
    return loss, metrics
