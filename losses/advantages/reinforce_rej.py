"""Reinforce-Rej and RAFT++: raw rewards, without the prompts that are answered all alike."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_mean, rows_to_tokens
from losses.ops.options import check_option
from losses.ops.surrogates import clipped_token_mean, ratio_metrics


@paper(
    "reinforce-rej",
    kind="objective",
    title="A Minimalist Approach to LLM Reasoning: from Rejection Sampling to Reinforce",
    arxiv="2504.11343",
    year=2025,
    metric="rejected_wrong_fraction",
)
def reinforce_rej_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    group_ids,
    *,
    mode="reinforce_rej",
    is_clip=True,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=3.0,
):
    """REINFORCE on raw rewards with whole prompts rejected.

        mode="reinforce_rej"  A_i = r_i, or 0 if the rewards of its group (two or more) are equal
        mode="raft"           A_i = max(r_i, 0)
        l    = max( -r A, -clip(r, 1 - clip_low, 1 + clip_high) A )    at most -dual_clip A if A < 0
               without is_clip: -A logprobs
        loss = sum m l / sum m

    Rejected responses keep their tokens in the denominator. The authors' trainer adds a k3 penalty
    of weight 0.001 (`regularizers=("kl_penalty", {"kl_coef": 0.001})`).

    Args:
      logprobs, old_logprobs, mask: [B,T].
      rewards: [B] positive where right.
      group_ids: [B] int.
      mode: "reinforce_rej" or "raft".
      is_clip: importance ratio and clip (the "++" loss).
      clip_low, clip_high: window of the ratio.
      dual_clip: bound where A < 0; None: none.

    Returns:
      (loss, metrics); `rejected_right_fraction`, `rejected_wrong_fraction` are shares of all groups
      that have two or more members and one reward, > 0 or <= 0, in any mode.

    Raises:
      ValueError: unknown mode.

    Reference: Xiong et al. 2025, arXiv 2504.11343.
    """
    check_option("mode", mode, ("reinforce_rej", "raft"))
    alike = groups.all_equal(rewards, group_ids) & (groups.group_size(group_ids) > 1)
    if mode == "raft":
        advantages = jnp.maximum(rewards, 0.0)
    else:
        advantages = jnp.where(alike, 0.0, rewards)
    once = groups.first_in_group(group_ids)
    number = groups.number_of_groups(group_ids, rewards.dtype)
    rejected = {
        "rejected_right_fraction": jnp.sum(once & alike & (rewards > 0)) / number,
        "rejected_wrong_fraction": jnp.sum(once & alike & (rewards <= 0)) / number,
    }
    if is_clip:
        loss, metrics = clipped_token_mean(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )
        return loss, {**metrics, **rejected}
    loss = -masked_mean(rows_to_tokens(advantages, mask) * logprobs, mask)
    metrics = {
        **ratio_metrics(logprobs, old_logprobs, mask),
        "clip_fraction": jnp.zeros_like(loss),
        "surprisal": -masked_mean(jax.lax.stop_gradient(logprobs), mask),
    }
    return loss, {**jax.lax.stop_gradient(metrics), **rejected}
