"""SENT: a KL brake on low-entropy tokens, stronger where advantage and log-probability co-vary."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.divergences import kl_estimate
from losses.ops.masked import masked_max, masked_mean, masked_min
from losses.ops.order import share, top
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


def semantic_entropy(answer_ids, group_ids):
    """Entropy in nats of the final answers of each prompt's responses, repeated on its rows, [B].

    Args:
      answer_ids: [B] int, equal where the answers match.
      group_ids: [B] int.
    """
    same = groups.same_group(group_ids)
    alike = same & (answer_ids[:, None] == answer_ids[None, :])
    share_of_answer = jnp.sum(alike, axis=1) / jnp.sum(same, axis=1)
    return groups.group_mean(-jnp.log(share_of_answer), group_ids)


@paper(
    "sent",
    kind="objective",
    base="grpo",
    title="Efficient Reinforcement Learning with Semantic and Token Entropy for LLM Reasoning",
    arxiv="2512.04359",
    year=2025,
    metric="kl",
)
def sent_loss(
    logprobs,
    old_logprobs,
    old_entropy,
    advantages,
    mask,
    *,
    low_ratio=0.8,
    cov_ratio=0.2,
    beta=0.005,
    beta_cov=0.05,
    clip_low=0.2,
    clip_high=0.2,
):
    """Clipped surrogate, with a KL penalty to the rollout policy on low-entropy tokens only.

        Low  = the ceil(low_ratio N) valid tokens of smallest old_entropy
        cov  = (A - mean_Low A)(logprobs - mean_Low logprobs) on Low
        High = the ceil(cov_ratio |Low|) tokens of Low of largest cov
        c    = beta_cov on High, beta on the rest of Low, else 0
        loss = sum m ( -min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) + c k3 ) / sum m

    k3 = exp(d) - d - 1 with d = old_logprobs - logprobs: value and gradient vanish on-policy. Both
    sets hold at least one token; ties go to the earlier token in row-major order. Sets are
    constant.

    Args:
      logprobs, old_logprobs, old_entropy, advantages, mask: [B,T].
      low_ratio: share of the batch's tokens in Low.
      cov_ratio: share of Low in High.
      beta, beta_cov: KL weights on Low and on High.
      clip_low, clip_high: window of the ratio.

    Returns:
      (loss, metrics).

    Reference: arXiv 2512.04359, whose formulas could not be read: the KL to the rollout policy and
    the selection by covariance follow verl's KL-Cov, the coefficients are assumed.
    """
    low = top(-old_entropy, mask, jnp.maximum(share(low_ratio, jnp.sum(mask > 0)), 1), axis=None)

    def deviation(x):
        # Exactly 0 where all agree: the ties of the covariance are then ties, not rounding.
        equal = masked_max(x, low) <= masked_min(x, low)
        return jnp.where(equal, 0.0, x - masked_mean(x, low))

    cov = deviation(advantages) * deviation(jax.lax.stop_gradient(logprobs))
    high = top(cov, low, jnp.maximum(share(cov_ratio, jnp.sum(low)), 1), axis=None)
    coefficient = jnp.where(high > 0, beta_cov, beta * low)

    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    drift = jnp.clip(log_ratio(logprobs, old_logprobs, mask), -WIDE_BOUND, WIDE_BOUND)
    k3 = kl_estimate(drift, "k3")
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high) + coefficient * k3
    held = jax.lax.stop_gradient(k3)
    metrics = {
        "kl": masked_mean(held, mask),
        "kl_penalty": masked_mean(coefficient * held, mask),
        "selected_fraction": masked_mean(high, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return masked_mean(term, mask), metrics
