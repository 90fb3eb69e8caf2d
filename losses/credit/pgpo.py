"""PGPO: advantage moved to the tokens that needed the evidence, keeping its sum."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops import divergences
from losses.ops.masked import count, masked_max, masked_sum, select
from losses.ops.order import quantile as row_quantile


def token_dependency(full_logits, bare_logits, mask):
    """KL of the predictions with the evidence from those without it, nats, [B,T].

        S_it = KL( p(. | prompt with evidence, y_<t) || p(. | prompt without evidence, y_<t) )

    Args:
      full_logits, bare_logits: [B,T,V] of the same response under both prompts.
      mask: [B,T].
    """
    full, bare = divergences.log_softmax(full_logits), divergences.log_softmax(bare_logits)
    return select(jnp.maximum(divergences.kl(full, bare), 0.0), mask)


@paper(
    "pgpo",
    kind="credit",
    base="grpo",
    title="Not All Tokens See Equally: Perception-Grounded Policy Optimization for Large "
    "Vision-Language Models",
    arxiv="2604.01840",
    year=2026,
)
def pgpo_advantage(
    advantages, dependency: Tokens, mask, *, quantile=0.6, boost=1.0, floor=0.5, eps=1e-8
):
    """Advantage raised above a row quantile of dependency, lowered below it, mean weight 1.

        u_t  = 1 + boost S_t / (max S + eps)   where S_t >= quantile(S) and S_t > 0,  else floor
        out  = A_t u_t n / sum u

    Everything per response over its n valid tokens; the quantile is linear between order
    statistics, and an order statistic it falls on passes the >=.

    Args:
      advantages, mask: [B,T].
      dependency: [B,T] S of `token_dependency`, under the old policy.
      quantile: of S within the response.
      boost: extra weight of the most dependent token.
      floor: weight of suppressed tokens before normalisation, > 0.
      eps: added to the maximum.

    Returns:
      advantages [B,T]; zeros on a fully masked row.

    Raises:
      ValueError: floor is not positive.

    Reference: arXiv 2604.01840. Measure, gate and conservation are the abstract's; the form of the
    gate and the constants are assumed.
    """
    if floor <= 0:
        raise ValueError(f"floor must be positive, got {floor}.")
    s = select(dependency, mask)
    gated = (s >= row_quantile(s, mask, quantile)) & (s > 0)
    weight = jnp.where(gated, 1 + boost * s / (masked_max(s, mask, -1, keepdims=True) + eps), floor)
    total = masked_sum(weight, mask, -1, keepdims=True)
    weight = weight * count(mask, -1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    return select(advantages * weight, mask)
