"""Invalid action masking: the policy gradient of the distribution over allowed tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops.divergences import entropy_of, log_softmax, of_token
from losses.ops.masked import masked_mean, select
from losses.ops.options import check_option
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics

EXCLUDED = -1e8
"""The logit of a forbidden token: its probability is exactly 0 in any precision."""


@paper(
    "invalid-action-masking",
    kind="objective",
    base="ppo",
    title="A Closer Look at Invalid Action Masking in Policy Gradient Algorithms",
    arxiv="2006.14171",
    year=2020,
    metric="invalid_mass",
)
def masked_policy_loss(
    logits,
    tokens,
    valid_tokens: Float[Array, "B T V"],
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    entropy_coef=0.01,
    variant="masked",
):
    """PPO's clipped loss and entropy bonus under the distribution restricted to allowed tokens.

        logp = log_softmax( where(valid_tokens, logits, -1e8) ),   a_t = logp[tokens_t]
        r_t  = exp(a_t - old_logprobs_t),   H_t = - sum over valid v of exp(logp_v) logp_v
        loss = sum m ( - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - entropy_coef H ) / sum m

    The gradient at forbidden logits is exactly 0. variant="naive" samples under the mask but takes
    a and H from log_softmax(logits). A position without an allowed token must have mask 0.

    Args:
      logits: [B,T,V].
      tokens: [B,T] int, allowed where mask is 1.
      valid_tokens: [B,T,V] 1 where the state allows the token.
      old_logprobs: [B,T] under the same restriction.
      advantages, mask: [B,T].
      clip_low, clip_high: the ratio's window.
      entropy_coef: weight of the entropy bonus.
      variant: "masked" or "naive".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown variant.

    Reference: Huang and Ontanon 2020, arXiv 2006.14171; the naive variant's entropy and old
    log-probabilities are a choice made here.
    """
    check_option("variant", variant, ("masked", "naive"))
    valid = valid_tokens > 0
    full = log_softmax(logits)
    log_p = full if variant == "naive" else log_softmax(jnp.where(valid, logits, EXCLUDED))
    logprobs = select(of_token(log_p, tokens), mask)
    entropy = entropy_of(log_p)
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    term = -clipped_surrogate(ratio, advantages, clip_low, clip_high) - entropy_coef * entropy
    invalid = jnp.sum(jnp.where(valid, 0.0, jnp.exp(full)), axis=-1)
    metrics = {
        "invalid_mass": masked_mean(invalid, mask),
        "entropy": masked_mean(entropy, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return masked_mean(term, mask), metrics
