"""T-REG: DPO with a weak preference for token rewards that the reference model makes itself."""

import jax

from losses.arrays import Rows, Tokens
from losses.catalogue import paper
from losses.ops.masked import masked_mean, masked_sum
from losses.ops.pairs import (
    logistic_loss,
    margin_metrics,
    margins,
    mean_over_pairs,
    pair_table,
    side_metrics,
    table_sides,
)
from losses.ops.ratios import log_ratio, sequence_log_ratio


@paper(
    "t-reg",
    kind="objective",
    base="dpo",
    title="T-REG: Preference Optimization with Token-Level Reward Regularization",
    arxiv="2412.02685",
    year=2024,
    metric="token_reward_abs",
)
def t_reg_loss(
    logprobs,
    ref_logprobs,
    better_logprobs: Tokens,
    worse_logprobs: Tokens,
    mask,
    chosen: Rows,
    group_ids,
    *,
    beta=0.1,
    alpha=0.25,
):
    """DPO plus a likelihood term weighted by self-generated token rewards.

        rhat_t = sigmoid(better_t - worse_t) - 1/2                                  constant
        R(y)   = beta sum_t m (logprobs_t - ref_logprobs_t)
        reg(y) = - sum_t m beta rhat_t logprobs_t
        loss   = mean over pairs of  -log sigmoid(R_c - R_r)
                 + alpha stop_grad( sigmoid(R_r - R_c) ) ( reg_c + reg_r )

    The weight is DPO's own per-pair weight, so a chosen token's pull is scaled by 1 + alpha rhat
    and a rejected one's push by 1 - alpha rhat. reg is not normalised by length. An id with more
    than two rows gives all its combinations; rows without a partner or without tokens form no pair;
    no pair: loss 0.

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      better_logprobs, worse_logprobs: [B,T] of the same tokens under the reference model when asked
        to improve, and to worsen, the response.
      chosen: [B] 1 or 0.
      group_ids: [B] int.
      beta: inverse temperature.
      alpha: weight of the regulariser; 0 is DPO.

    Returns:
      (loss, metrics).

    Reference: arXiv 2412.02685, read in a summary: the constant weight and beta are assumptions.
    """
    token_rewards = jax.nn.sigmoid(log_ratio(better_logprobs, worse_logprobs, mask)) - 0.5
    reward = beta * sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=False)
    reg = -masked_sum(beta * token_rewards * logprobs, mask, axis=-1)
    pairs = pair_table(chosen, group_ids, mask)
    margin = margins(reward)
    weight = jax.lax.stop_gradient(jax.nn.sigmoid(-margin))
    term = logistic_loss(margin) + alpha * weight * (reg[:, None] + reg[None, :])
    metrics = {
        "token_reward_abs": masked_mean(abs(token_rewards), mask),
        "weight_mean": mean_over_pairs(weight, pairs),
        **margin_metrics(margin, pairs),
        **side_metrics(*table_sides(masked_sum(logprobs, mask, axis=-1), pairs)),
    }
    return mean_over_pairs(term, pairs), metrics
