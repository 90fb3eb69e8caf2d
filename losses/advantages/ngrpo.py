"""NGRPO: a virtual right answer in every group, so that all-wrong groups push down."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.surrogates import clipped_token_mean

_PAPER = {
    "title": "NGRPO: Negative-enhanced Group Relative Policy Optimization",
    "year": 2025,
}


@paper("ngrpo", kind="selection", companion=True, metric="kept_fraction", **_PAPER)
def ngrpo_keep(rewards, group_ids, *, r_max=1.0):
    """0 on groups in which every response has the maximum reward, else 1, [B].

    Args:
      rewards: [B].
      group_ids: [B] int.
      r_max: the maximum reward.

    Returns:
      keep [B], constant.
    """
    return (groups.group_min(rewards, group_ids) < r_max).astype(rewards.dtype)


@paper(
    "ngrpo",
    kind="objective",
    base="dapo",
    stages={"selection": "ngrpo_keep"},
    metric="clip_fraction",
    **_PAPER,
)
def ngrpo_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    group_ids,
    *,
    r_max=1.0,
    n_virtual=1,
    clip_low=0.16,
    clip_high=0.24,
    eps=1e-6,
):
    """The clipped surrogate with group statistics that count virtual maximal rewards.

        mu, sd = mean and unbiased std of the group's rewards with n_virtual copies of r_max
        A_i    = (r_i - mu) / (sd + eps)
        loss   = - sum m min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) / sum m

    n + n_virtual equal values give exactly 0; a group of one A = r / (1 + eps). The trainer drops
    all-right groups before the update (`ngrpo_keep`); here their tokens stay in the denominator.

    Args:
      logprobs, old_logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      r_max: the maximum reward.
      n_virtual: virtual responses per group.
      clip_low, clip_high: window of the ratio, tighter where A < 0.
      eps: added to the standard deviation.

    Returns:
      (loss, metrics).

    Reference: nangongrui-ngr/NGRPO, 2025.
    """
    advantages = virtual_advantage(rewards, group_ids, r_max, n_virtual, eps)
    return clipped_token_mean(
        logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high
    )


def virtual_advantage(rewards, group_ids, r_max, n_virtual, eps):
    """(r - mu) / (sd + eps) with n_virtual rewards of r_max in each group, [B]."""
    n = groups.group_size(group_ids, dtype=rewards.dtype)
    total = n + n_virtual
    mu = (groups.group_sum(rewards, group_ids) + n_virtual * r_max) / total
    members = groups.same_group(group_ids)
    squares = jnp.sum(jnp.where(members, (rewards[None, :] - mu[:, None]) ** 2, 0), axis=1)
    squares = squares + n_virtual * (r_max - mu) ** 2
    sd = jnp.sqrt(squares / jnp.maximum(total - 1, 1))
    flat = groups.all_equal(rewards, group_ids)
    if n_virtual:
        flat = flat & (rewards == r_max)
    value = jnp.where(flat, 0.0, (rewards - mu) / (sd + eps))
    return jnp.where(n == 1, rewards / (1 + eps), value)
