"""REC: group-relative REINFORCE as an off-policy method, with and without clip and weight."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_mean
from losses.ops.options import check_option
from losses.ops.ratios import WIDE_BOUND, bounded_exp, log_ratio, token_ratio
from losses.ops.surrogates import clipped_side, ratio_metrics

CLIP_MODES = ("none", "one-side", "two-side", "ring")
WEIGHTS = ("none", "importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")


@paper(
    "rec",
    kind="objective",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    arxiv="2509.24203",
    year=2025,
    metric="kept_fraction",
)
def rec_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    group_ids,
    *,
    clip_mode="one-side",
    weight="none",
    regularizer="none",
    clip_low=0.2,
    clip_high=0.2,
    clip_low_out=0.6,
    clip_high_out=2.0,
    temperature=1.0,
    tau=0.1,
    std_normalize=False,
):
    """REINFORCE with a group baseline, a keep mask by ratio, a constant weight and a regulariser.

        x_bt = - k_bt v_bt A_b logprobs_bt + reg_bt,   loss = sum m x / sum m
        A_b  = rewards_b - group mean  (/ (population std + 1e-6) with std_normalize)
        k:  "none"      1
            "one-side"  A >= 0 and r <= 1 + clip_high, or A <= 0 and r >= 1 - clip_low
            "two-side"  1 - clip_low <= r <= 1 + clip_high
            "ring"      two-side, or A >= 0 and r <= 1 - clip_low_out,
                        or A <= 0 and r >= 1 + clip_high_out
        v:  "none" 1,  "importance_sampling" r,  "advantage" exp(A / temperature)
        reg: "none" 0,  "k2" tau (logprobs - old_logprobs)^2,  "forward-kl" -tau logprobs

    k, v, A are constants; r = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 there
    only. The regulariser is not masked by k; dropped tokens stay in the denominator. A group of one
    has mean 0 and std 1 (the evident intent of the authors' code).

    Args:
      logprobs, old_logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      clip_mode, weight, regularizer: as above.
      clip_low, clip_high, clip_low_out, clip_high_out: bounds; None: absent.
      temperature: of the advantage weight.
      tau: weight of the regulariser.
      std_normalize: divide by the group's spread.

    Returns:
      (loss, metrics).

    Raises:
      ValueError: an unknown option.

    Reference: arXiv 2509.24203; Trinity-RFT. The outer bounds are those of its example.
    """
    check_option("clip_mode", clip_mode, CLIP_MODES)
    check_option("weight", weight, WEIGHTS)
    check_option("regularizer", regularizer, REGULARIZERS)
    alone = groups.group_size(group_ids) == 1
    gain = jnp.where(alone, rewards, groups.centred(rewards, group_ids))
    if std_normalize:
        std = jnp.where(alone, 1.0, groups.group_std(rewards, group_ids, ddof=0))
        gain = gain / (std + 1e-6)
    gain = gain[:, None]
    ratio = jax.lax.stop_gradient(token_ratio(logprobs, old_logprobs, mask))
    keep = _kept(ratio, gain, clip_mode, (clip_low, clip_high), (clip_low_out, clip_high_out))
    factor = {
        "none": jnp.ones_like(ratio),
        "importance_sampling": ratio,
        "advantage": bounded_exp(gain / temperature, WIDE_BOUND),
    }[weight]
    term = -jnp.where(keep, factor, 0.0) * gain * logprobs
    if regularizer == "k2":
        term = term + tau * log_ratio(logprobs, old_logprobs, mask) ** 2
    elif regularizer == "forward-kl":
        term = term - tau * logprobs
    metrics = {
        "kept_fraction": masked_mean(keep.astype(mask.dtype), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return masked_mean(term, mask), metrics


def _kept(ratio, gain, clip_mode, inner, outer):
    """Boolean [B,T]: the tokens that a clip mode keeps."""
    if clip_mode == "none":
        return jnp.ones(ratio.shape, bool)
    if clip_mode == "one-side":
        return ~clipped_side(ratio, gain, *inner)
    low, high, low_out, high_out = (jnp.inf if b is None else b for b in (*inner, *outer))
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    if clip_mode == "two-side":
        return inside
    returning = (gain >= 0) & (ratio <= 1 - low_out) | (gain <= 0) & (ratio >= 1 + high_out)
    return inside | returning


def red_drop(rewards, group_ids, key):
    """RED-Drop: random wrong responses are dropped until each group has no more wrong than right.

    A response is right if its reward is at least its group's mean.

    Args:
      rewards: [B].
      group_ids: [B] int.
      key: random key; which of a group's wrong responses go.

    Returns:
      (keep, advantages): [B] 1 for kept responses; [B] reward minus the mean of the group's kept
      rewards, 0 where dropped.

    Reference: arXiv 2509.24203.
    """
    rewards, group_ids = jnp.asarray(rewards), jnp.asarray(group_ids)
    right = groups.centred(rewards, group_ids) >= 0
    draw = jax.random.permutation(key, rewards.shape[0])
    place = groups.group_rank(draw, group_ids, ~right)
    keep = right | (place < groups.group_size(group_ids, right))
    gain = jnp.where(keep, groups.centred(rewards, group_ids, keep), 0.0)
    return keep.astype(rewards.dtype), gain
