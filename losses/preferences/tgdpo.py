"""TGDPO: DPO whose temperature depends on a guide's reward of the token."""

import jax.numpy as jnp

from losses.arrays import Rows, Tokens
from losses.catalogue import paper
from losses.ops.masked import masked_max, masked_min, masked_sum
from losses.ops.pairs import (
    logistic_loss,
    margin_metrics,
    margins,
    mean_over_pairs,
    pair_table,
    side_metrics,
    table_sides,
)
from losses.ops.ratios import log_ratio


@paper(
    "tgdpo",
    kind="objective",
    base="dpo",
    title=(
        "TGDPO: Harnessing Token-Level Reward Guidance for Enhancing Direct Preference Optimization"
    ),
    arxiv="2506.14574",
    year=2025,
    metric="factor_max",
)
def tgdpo_loss(
    logprobs,
    ref_logprobs,
    reward_logprobs: Tokens,
    mask,
    chosen: Rows,
    group_ids,
    *,
    beta=0.1,
    alpha=0.5,
):
    """DPO's loss on implicit rewards that are weighted token by token.

        u_t    = m_t (logprobs_t - ref_logprobs_t)
        rhat_t = beta m_t (reward_logprobs_t - ref_logprobs_t)                   constant
        f_t    = 1 + alpha rhat_t on a chosen row,  1 - alpha rhat_t on a rejected one
        s      = sum_t beta f_t u_t
        loss   = mean over pairs (i chosen, j rejected, same id) of -log sigmoid(s_i - s_j)

    f is not clamped and may be negative. An id with more than two rows gives all its combinations;
    rows without a partner or without tokens form no pair; no pair: loss 0.

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      reward_logprobs: [B,T] of the frozen guide, a policy trained by DPO from the same start.
      chosen: [B] 1 or 0.
      group_ids: [B] int.
      beta: inverse temperature.
      alpha: weight of the token reward; 0 is DPO.

    Returns:
      (loss, metrics).

    Reference: arXiv 2506.14574, as released (no clamp).
    """
    moved = log_ratio(logprobs, ref_logprobs, mask)
    guide = beta * log_ratio(reward_logprobs, ref_logprobs, mask)
    factor = 1 + alpha * jnp.where(chosen > 0, 1.0, -1.0)[:, None] * guide
    score = masked_sum(beta * factor * moved, mask, axis=-1)
    pairs = pair_table(chosen, group_ids, mask)
    margin = margins(score)
    rewards = table_sides(masked_sum(beta * moved, mask, axis=-1), pairs)
    metrics = {
        "factor_min": masked_min(factor, mask),
        "factor_max": masked_max(factor, mask),
        "chosen_reward": rewards[0],
        "rejected_reward": rewards[1],
        **margin_metrics(margin, pairs),
        **side_metrics(*table_sides(masked_sum(logprobs, mask, axis=-1), pairs)),
    }
    return mean_over_pairs(logistic_loss(margin), pairs), metrics
