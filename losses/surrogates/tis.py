"""Truncated importance sampling against the sampler's own probabilities."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.ratios import bounded_exp, log_ratio, sequence_log_ratio


@paper(
    "tis",
    kind="credit",
    base="grpo",
    title="Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (TIS)",
    year=2025,
)
def tis_credit(advantages, old_logprobs, sampler_logprobs, mask, *, level="token", cap=2.0):
    """Advantages times the trainer/sampler ratio, truncated above, [B,T].

        w_it = min( exp(d_it), cap )                          level="token"
        w_it = min( exp(sum_t m_it d_it), cap )               level="sequence"
        out  = m w A,    d = old_logprobs - sampler_logprobs

    Weighting the advantage equals weighting the clipped surrogate, which is positively homogeneous
    in A; KL and entropy terms stay unweighted. No lower bound.

    Args:
      advantages, old_logprobs, sampler_logprobs, mask: [B,T].
      level: "token" (the post's form) or "sequence".
      cap: upper bound of w; None: none.

    Returns:
      advantages [B,T], constant.

    Raises:
      ValueError: unknown level.

    Reference: Yao et al. 2025 (post); TRL, verl.
    """
    weight = mismatch_ratio(old_logprobs, sampler_logprobs, mask, level)
    weight = weight if cap is None else jnp.minimum(weight, cap)
    return select(weight * advantages, mask)


def mismatch_ratio(old_logprobs, sampler_logprobs, mask, level):
    """exp(log pi_old - log mu) per token or per sequence (its sum), broadcast to [B,T]."""
    if level == "token":
        return bounded_exp(log_ratio(old_logprobs, sampler_logprobs, mask))
    if level == "sequence":
        total = sequence_log_ratio(old_logprobs, sampler_logprobs, mask, normalise=False)
        return jnp.broadcast_to(bounded_exp(total)[:, None], mask.shape)
    raise ValueError(f"Unknown level {level!r}; one of token, sequence.")
