"""RLFR: a small penalty where hidden states leave the flow of good reasoning, summed to the end."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_max, masked_min, select
from losses.ops.order import top


@paper(
    "rlfr",
    kind="advantage",
    base="grpo",
    title="RLFR: Extending Reinforcement Learning for LLMs with Flow Environment",
    arxiv="2510.10201",
    year=2025,
    stages={"objective": ("grpo_loss", {"beta": 0.0})},
)
def rlfr_advantage(
    rewards, flow_scores: Tokens, group_ids, mask, *, beta=0.01, eta=0.6, top_k=15, eps=1e-9
):
    """Group advantage minus the kept flow deviations from t on.

        n_it  = minmax(v_i)_t over the valid tokens of the response        (0 if all are equal)
        n_it <- n_it if n_it > eta and among the top_k largest of the response, else 0
        out   = A_i - beta sum_{t' >= t} n_it'

    A is the group-relative advantage with the unbiased standard deviation, over all responses of
    the group. Ties for the last kept place go to the earlier token.

    Args:
      rewards, group_ids: [B].
      flow_scores: [B,T] v >= 0, deviation of each token's velocity from the flow network's.
      mask: [B,T].
      beta: weight of the penalty.
      eta: smallest normalised deviation that counts.
      top_k: most tokens of a response that carry a penalty.
      eps: added to the standard deviation.

    Returns:
      advantages [B,T].

    Reference: arXiv 2510.10201; defaults of the authors' scripts. Their row minimum is the
    second-smallest value of the padded row; the valid minimum is meant and taken here.
    """
    v = select(flow_scores, mask)
    low, high = masked_min(v, mask, -1, keepdims=True), masked_max(v, mask, -1, keepdims=True)
    deviation = jnp.where(high > low, (v - low) / jnp.where(high > low, high - low, 1.0), 0.0)
    kept = top(deviation, mask, top_k) * (deviation > eta)
    penalty = beta * deviation * kept
    remaining = jnp.cumsum(penalty[:, ::-1], axis=1)[:, ::-1]
    advantages = groups.standardised(rewards, group_ids, eps=eps)
    return select(advantages[:, None] - remaining, mask)
