"""BNPO: centred rewards over the density of a Beta distribution fitted to the success rates."""

import jax.numpy as jnp
from jax.scipy.special import betaln, xlog1py, xlogy

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_mean, masked_var

NO_SPREAD = 1e-12


@paper(
    "bnpo",
    kind="advantage",
    base="dapo",
    title="BNPO: Beta Normalization Policy Optimization",
    year=2025,
    stages={
        "objective": (
            "dual_clip_loss",
            {"clip_high": 0.28, "dual_clip": 10.0, "aggregation": "sequence_sum"},
        )
    },
)
def bnpo_advantage(rewards, group_ids, *, min_value=0.0, max_value=1.0, max_weight=1e6):
    """Reward minus group mean, divided by the density of the group's success rate, [B].

        x_i  = (r_i - min_value) / (max_value - min_value)
        p_g  = mean of x over the group, 0 for a group of one
        m, v = mean and unbiased variance of p over groups       (one group: 0 and 1)
        s    = m (1 - m) / v - 1,   alpha = max(1, 1 + s m / 3),   beta = max(1, 1 + s (1 - m) / 3)
        A_i  = min( 1 / BetaPDF(p_g; alpha, beta), max_weight ) (x_i - p_g)

    A uniform density gives REINFORCE with a baseline, Beta(3/2, 3/2) is proportional to GRPO's
    standard deviation. Where the density is 0 the weight is max_weight; a group of two or more
    equal rewards gives exactly 0. Of several reward components each is normalised on its own
    (`jax.vmap` over the columns) and the results averaged.

    Args:
      rewards: [B] in [min_value, max_value]; not clipped.
      group_ids: [B] int; the batch must hold several groups of two or more.
      min_value, max_value: range of the rewards.
      max_weight: upper bound of the weight.

    Returns:
      advantages [B], constant.

    Reference: Xiao et al. 2025; changyi7231/BNPO. Success rates without spread (v <= 1e-12) divide
    by zero in the authors' code; the weight is 1 here.
    """
    x = (rewards - min_value) / (max_value - min_value)
    several = groups.group_size(group_ids) > 1
    p = jnp.where(several, groups.group_mean(x, group_ids), 0.0)
    once = groups.first_in_group(group_ids).astype(x.dtype)
    single = groups.number_of_groups(group_ids) == 1
    m = jnp.where(single, 0.0, masked_mean(p, once))
    v = jnp.where(single, 1.0, masked_var(p, once, ddof=1))

    spread = v > NO_SPREAD
    s = m * (1 - m) / jnp.where(spread, v, 1.0) - 1
    a, b = jnp.maximum(1.0, 1 + s * m / 3), jnp.maximum(1.0, 1 + s * (1 - m) / 3)
    held = jnp.clip(p, 0.0, 1.0)  # a rounding error beyond the ends has no logarithm
    log_weight = betaln(a, b) - xlogy(a - 1, held) - xlog1py(b - 1, -held)
    weight = jnp.exp(jnp.minimum(log_weight, jnp.log(max_weight)))
    weight = jnp.where(spread, weight, jnp.minimum(1.0, max_weight))
    return weight * jnp.where(several, groups.centred(x, group_ids), x)
