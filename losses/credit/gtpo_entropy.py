"""GTPO and GRPO-S: outcome rewards shaped by policy entropy, per token and per response."""

import jax.numpy as jnp

from losses.catalogue import nearest, paper
from losses.ops.groups import column_sum, group_index
from losses.ops.masked import masked_mean, select
from losses.ops.pools import standardised

NORMALIZATIONS = ("separate", "joint", "none")
FLOOR = 1e-8


@paper(
    "gtpo-entropy",
    kind="advantage",
    base="dapo",
    title="GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy",
    arxiv="2508.04349",
    year=2025,
    stages={"objective": ("dapo_loss", {"clip_high": 0.2})},
)
def gtpo_advantage(
    rewards,
    old_entropy,
    group_ids,
    mask,
    *,
    alpha1=1.0,
    alpha2=0.1,
    threshold=0.5,
    normalize="separate",
):
    """Correct responses earn where they were uncertain, wrong ones lose where certain, [B,T].

        correct i:  + ( alpha1 + alpha2 |P_t| H_it / sum_{k in P_t} H_kt )
        wrong j:    - ( alpha1 + alpha2 |N_t| (1/H_jt) / sum_{k in N_t} 1/H_kt )

    H = max(old_entropy, 1e-8); P_t and N_t are the group's correct (reward > threshold) and wrong
    responses that have a valid token in column t. Then (x - mean) / (population std + 1e-8) over
    the valid tokens of the group's correct responses and, apart, of its wrong ones ("separate"),
    over all of the group's ("joint"), or not at all ("none"). A pool of one token, or one that
    spreads by no more than 1e-6: 0.

    Args:
      rewards: [B].
      old_entropy: [B,T] nats.
      group_ids: [B] int.
      mask: [B,T].
      alpha1, alpha2: the outcome's share and the entropy's share of a token reward.
      threshold: rewards above it count as correct.
      normalize: "separate", "joint" or "none".

    Returns:
      advantages [B,T], constant.

    Raises:
      ValueError: unknown normalize.

    Reference: arXiv 2508.04349, read second-hand. "separate" centres each side on zero, which takes
    the outcome out of the signal: compare "joint" before trusting it.
    """
    return _shaped(rewards, old_entropy, group_ids, mask, alpha1, alpha2, threshold, normalize)


def grpo_s_advantage(
    rewards,
    old_entropy,
    group_ids,
    mask,
    *,
    alpha1=1.0,
    alpha2=0.1,
    threshold=0.5,
    normalize="separate",
):
    """`gtpo_advantage` once per response, with its mean entropy in place of the token's, [B].

    Responses without a valid token get 0 and count nowhere. The loss pairs it with the mean of the
    token ratios as the response's ratio.
    """
    mask = jnp.asarray(mask, old_entropy.dtype)
    entropy = masked_mean(jnp.maximum(old_entropy, FLOOR), mask, axis=-1)[:, None]
    used = jnp.any(mask > 0, axis=-1).astype(mask.dtype)[:, None]
    out = _shaped(rewards, entropy, group_ids, used, alpha1, alpha2, threshold, normalize)
    return out[:, 0]


def _shaped(rewards, entropy, group_ids, mask, alpha1, alpha2, threshold, normalize):
    if normalize not in NORMALIZATIONS:
        raise ValueError(
            f"Unknown normalize {normalize!r}.{nearest(normalize, NORMALIZATIONS)} "
            f"One of {', '.join(NORMALIZATIONS)}."
        )
    correct = rewards > threshold
    side = 2 * group_index(group_ids) + correct
    h = jnp.maximum(entropy, FLOOR)
    part = select(jnp.where(correct[:, None], h, 1 / h), mask)
    total = column_sum(part, side)
    present = column_sum((mask > 0).astype(mask.dtype), side)
    reward = alpha1 + alpha2 * present * part / jnp.where(total > 0, total, 1.0)
    reward = select(jnp.where(correct[:, None], reward, -reward), mask)
    if normalize == "none":
        return reward
    pool = side if normalize == "separate" else group_ids
    return standardised(reward, mask, pool, eps=1e-8)
