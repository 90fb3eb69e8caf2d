"""ERPO: a signed token term at decision points, on one scale for every prompt."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.pools import standardised
from losses.ops.ratios import log_ratio


@paper(
    "erpo",
    kind="credit",
    base="grpo",
    title="ERPO: Token-Level Entropy-Regulated Policy Optimization for Large Reasoning Models",
    arxiv="2603.28204",
    year=2026,
)
def erpo_advantage(
    advantages,
    old_entropy,
    old_logprobs,
    ref_logprobs,
    group_ids,
    mask,
    *,
    gamma=1.0,
    buckets=4,
    lam=0.5,
    eps=1e-6,
):
    """Adds an entropy-gated, stage-normalised implicit token reward to the advantage, [B,T].

        W_it   = sigmoid( gamma zscore_group(old_entropy)_it )
        bucket = floor( j buckets / n_i ),   j = 0..n_i - 1 the token's rank in its response
        s_it   = old_logprobs_it - ref_logprobs_it,   sn = zscore of s over group and bucket
        out    = m ( A + lam W sign(A) sn )

    zscore = (x - mean) / (population std + eps); 0 for a single token or a spread of at most 1e-6.
    The added term can exceed |A|, so the sign of A is not kept for certain.

    Args:
      advantages, old_entropy, old_logprobs, ref_logprobs, mask: [B,T].
      group_ids: [B] int.
      gamma: sharpness of the entropy gate.
      buckets: number of stages of a response, a static count.
      lam: weight of the added term.
      eps: added to standard deviations.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2603.28204, read second-hand: W and Psi = W sign(A) s~ are the paper's; s as
    the log-ratio to the reference, the buckets, the sum and the constants are assumptions.
    """
    gate = jax.nn.sigmoid(gamma * standardised(old_entropy, mask, group_ids, eps=eps))
    valid = (mask > 0).astype(jnp.int32)
    place = jnp.cumsum(valid, axis=-1) - 1
    n = jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True), 1)
    stage = jnp.clip(place, 0) * buckets // n
    implicit = log_ratio(old_logprobs, ref_logprobs, mask)
    score = standardised(
        implicit, mask, group_ids, eps=eps, segment_ids=stage, num_segments=buckets
    )
    return select(advantages + lam * gate * jnp.sign(advantages) * score, mask)
