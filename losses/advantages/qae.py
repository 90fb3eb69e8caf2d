"""QAE: a quantile of the group as its baseline."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.options import check_option
from losses.ops.order import snapped


@paper(
    "qae",
    kind="advantage",
    base="dapo",
    title="Quantile Advantage Estimation: Stabilizing RLVR for LLM Reasoning",
    arxiv="2509.22611",
    year=2025,
)
def qae_advantage(rewards, group_ids, *, quantile=0.4, method="linear", eps=1e-6):
    """Reward minus the group's quantile, over the group's standard deviation, [B].

        x   = quantile (n - 1)                                     place in ascending order, from 0
        b   = r_floor(x) + (x - floor(x)) (r_floor(x)+1 - r_floor(x))          method="linear"
            = r_floor(x)                                                       method="lower"
        A_i = (r_i - b) / (std + eps)                  std unbiased, about the group's mean

    With binary rewards a gate: hard prompts learn from their successes, easy ones from their
    failures, the rest gets exactly 0. A group of one A = r / (1 + eps); equal rewards exactly 0.

    Args:
      rewards: [B].
      group_ids: [B] int.
      quantile: K; outside (0, 1) the baseline is the group mean (GRPO).
      method: "linear" (the authors' code) or "lower" (the theory's order statistic).
      eps: added to the standard deviation.

    Returns:
      advantages [B], constant.

    Raises:
      ValueError: unknown method.

    Reference: arXiv 2509.22611; junkangwu/QAE.
    """
    check_option("method", method, ("linear", "lower"))
    grpo = groups.standardised_or_raw(rewards, group_ids, eps=eps)
    if not 0 < quantile < 1:
        return grpo
    if method == "linear":
        baseline = groups.group_quantile(rewards, group_ids, quantile)
    else:
        n = groups.group_size(group_ids, dtype=rewards.dtype)
        place = jnp.floor(snapped(quantile * (n - 1))).astype(group_ids.dtype)
        baseline = groups.order_statistic(rewards, group_ids, place)
    value = (rewards - baseline) / (groups.group_std(rewards, group_ids) + eps)
    flat = groups.all_equal(rewards, group_ids)
    return jnp.where(flat, grpo, value)
