"""REINFORCE++: returns whitened over the whole batch."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.groups import group_mean
from losses.ops.masked import masked_mean, masked_var, select
from losses.ops.ratios import log_ratio
from losses.ops.returns import outcome_to_tokens


@paper(
    "reinforce-pp",
    kind="advantage",
    base="ppo",
    title="REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models",
    arxiv="2501.03262",
    year=2025,
    when={
        "group_ids": "group_baseline",
        "ref_logprobs": lambda h: h["kl_coef"] > 0,
        "old_logprobs": lambda h: h["kl_coef"] > 0,
    },
)
def reinforce_pp_advantages(
    rewards,
    mask,
    group_ids=None,
    old_logprobs=None,
    ref_logprobs=None,
    *,
    kl_coef=0.01,
    gamma=1.0,
    reward_clip=10.0,
    var_floor=1e-8,
    whiten=True,
    group_baseline=False,
):
    """Return-to-go of the reward with the KL folded in, whitened over the batch's tokens, [B,T].

        x_it = m_it ( -kl_coef (old_logprobs - ref_logprobs)_it + [t last] clip(r_i) )
        G_it = x_it + gamma G_i,t+1                       over all positions, x = 0 where masked
        A_it = m_it (G_it - mean) / sqrt(max(var, var_floor))        population variance, sum m

    With `group_baseline` r is first reduced by its group's mean and gamma is 1. All-equal groups
    do not give 0 after whitening. The authors' code uses the population variance, as here; verl's
    uses n - 1.

    Args:
      rewards: [B].
      mask: [B,T].
      group_ids: [B] int; read under `group_baseline` only.
      old_logprobs, ref_logprobs: [B,T]; read when kl_coef > 0.
      kl_coef: weight of the KL in the reward; <= 0 counts as 0.
      gamma: discount per position.
      reward_clip: bound on |r|.
      var_floor: lower bound of the variance.
      whiten: False returns m G.

    Returns:
      advantages [B,T], constant.

    Reference: Hu et al. 2025, arXiv 2501.03262; OpenRLHF.
    """
    if group_baseline:
        rewards, gamma = rewards - group_mean(rewards, group_ids), 1.0
    x = outcome_to_tokens(jnp.clip(rewards, -reward_clip, reward_clip), mask)
    if kl_coef > 0:
        x = x - kl_coef * log_ratio(old_logprobs, ref_logprobs, mask)

    def back(later, column):
        now = column + gamma * later
        return now, now

    start = jnp.zeros_like(x[:, 0])
    returns = jax.lax.scan(back, start, x.T, reverse=True)[1].T
    if whiten:
        scale = jnp.sqrt(jnp.maximum(masked_var(returns, mask), var_floor))
        returns = (returns - masked_mean(returns, mask)) / scale
    return select(returns, mask)
