"""WAPO: only the winners of a group are learnt from."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_mean, masked_sum, rows_to_tokens
from losses.ops.ratios import token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "wapo",
    kind="objective",
    title="A Gradient Perspective on RLVR Stability and Winner Advantage Policy Optimization",
    arxiv="2606.16154",
    year=2026,
    metric="winner_fraction",
)
def wapo_loss(
    logprobs, sampler_logprobs, mask, rewards, group_ids, *, clip_high=9.0, max_length=None
):
    """Positive advantages only, the ratio clipped from above far out, a constant normaliser.

        A_b    = max(rewards_b - group mean, 0)
        x_bt   = - min(r, 1 + clip_high) A_b
        loss_g = sum_{b in g} sum_t m x / (n_g max_length)
        loss   = sum_g loss_g / max(1, number of groups whose rewards differ)

    r = exp(logprobs - sampler_logprobs), the log-ratio clamped to +-20 (the code has no clamp). n_g
    counts all responses of the group. Groups of equal rewards add 0.

    Args:
      logprobs, sampler_logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      clip_high: r is held at 1 + clip_high; None: no bound.
      max_length: the run's maximum sequence length in tokens; None: T.

    Returns:
      (loss, metrics).

    Reference: arXiv 2606.16154; authors' code.
    """
    limit = mask.shape[1] if max_length is None else max_length
    gain = jnp.maximum(groups.centred(rewards, group_ids), 0.0)
    by_token = rows_to_tokens(gain, mask)
    ratio = token_ratio(logprobs, sampler_logprobs, mask)
    term = clipped_surrogate(ratio, by_token, None, clip_high)
    differ = ~groups.all_equal(rewards, group_ids) & groups.first_in_group(group_ids)
    usable = jnp.sum(differ).astype(mask.dtype)
    share = groups.group_size(group_ids, dtype=mask.dtype) * limit * jnp.maximum(usable, 1)
    metrics = {
        "winner_fraction": jnp.mean((gain > 0).astype(mask.dtype)),
        "usable_group_fraction": usable / groups.number_of_groups(group_ids, mask.dtype),
        "advantage_abs": masked_mean(by_token, mask),
        **ratio_metrics(logprobs, sampler_logprobs, mask),
        **clip_metrics(ratio, by_token, mask, None, clip_high),
    }
    return -jnp.sum(masked_sum(term, mask, axis=-1) / share), metrics
