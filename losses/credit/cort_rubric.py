"""CoRT: credit for the tokens that the rubric in the prompt made likelier."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.masked import masked_mean, select
from losses.ops.pools import rows_standardised
from losses.ops.ratios import log_ratio


@paper(
    "cort-rubric",
    kind="credit",
    base="grpo",
    title="CoRT: counterfactual replay for token-level credit in rubric-conditioned GRPO",
    year=2026,
)
def cort_advantage(
    advantages,
    old_logprobs,
    counterfactual_logprobs: Tokens,
    mask,
    *,
    strength=0.5,
    temperature=1.0,
    eps=1e-6,
):
    """Moves a response's advantage towards the tokens that depend on the grading criteria, [B,T].

        d_t = old_logprobs_t - counterfactual_logprobs_t
        z_t = (d_t - mean d) / (std d + eps)               per response, population std
        w_t = 1 + strength tanh(z_t / temperature), rescaled to mean 1 over the valid tokens
        out = m A w

    A response whose d spread by no more than 1e-6 (one token included): z = 0. The sum of a
    constant advantage over its response is unchanged.

    Args:
      advantages, old_logprobs, mask: [B,T].
      counterfactual_logprobs: [B,T] of the same tokens under the old policy, the criteria removed
        from the prompt.
      strength: in [0, 1), which keeps every weight positive.
      temperature: of the tanh.
      eps: added to the standard deviation.

    Returns:
      advantages [B,T], constant.

    Reference: from the abstract ("bounded", "response-normalised"); the tanh of a z-score, its
    constants, its sign and the scoring by the old policy are assumptions.
    """
    d = log_ratio(old_logprobs, counterfactual_logprobs, mask)
    weight = 1 + strength * jnp.tanh(rows_standardised(d, mask, eps=eps) / temperature)
    mean = jnp.where(jnp.any(mask > 0, axis=-1), masked_mean(weight, mask, axis=-1), 1.0)
    return select(advantages * weight / mean[:, None], mask)
