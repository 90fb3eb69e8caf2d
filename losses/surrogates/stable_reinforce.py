"""StableReinforce: the log-ratio held before exp, outlying advantages filtered."""

import math

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_max, masked_mean, masked_min, masked_var, select
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics

VAR_FLOOR = 1e-8


@paper(
    "stable-reinforce",
    kind="objective",
    base="ppo",
    title="R1-Reward: Training Multimodal Reward Model Through Stable Reinforcement Learning",
    arxiv="2505.02835",
    year=2025,
    stages={"advantage": ("reinforce-pp", {"kl_coef": 1e-3, "whiten": False})},
    metric="filtered_fraction",
)
def stable_reinforce_loss(
    logprobs,
    old_logprobs,
    mask,
    advantages,
    *,
    clip_low=0.2,
    clip_high=0.2,
    ratio_bound=1e3,
    filter_sigma=3.0,
):
    """The clipped surrogate on whitened advantages without outliers, the ratio bounded first.

        z = (A - mean) / sqrt(max(var, 1e-8)), 0 where |z| > filter_sigma     over all valid tokens
        r = exp( clip(logprobs - old_logprobs, -ln ratio_bound, ln ratio_bound) )
        loss = - mean_b (1/|m_b|) sum_t m min( r z, clip(r, 1 - clip_low, 1 + clip_high) z )

    Population variance, computed once before the filter. Beyond the bound r is constant, so a
    negative token has no gradient there either. All advantages equal: z = 0. Composed, the
    advantages are REINFORCE returns with the KL in the reward.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      clip_low, clip_high: the ratio's window; None: no bound.
      ratio_bound: largest ratio and inverse of the smallest; None: none.
      filter_sigma: largest |z|; None: no filter.

    Returns:
      (loss, metrics).

    Reference: arXiv 2505.02835. The published code compares z with mean +- 3 of the raw advantages;
    the three-sigma rule on z is used here.
    """
    flat = masked_max(advantages, mask) <= masked_min(advantages, mask)
    std = jnp.sqrt(jnp.maximum(masked_var(advantages, mask), VAR_FLOOR))
    z = jnp.where(flat, 0.0, (advantages - masked_mean(advantages, mask)) / std)
    filtered = jnp.abs(z) > (jnp.inf if filter_sigma is None else filter_sigma)
    z = select(jnp.where(filtered, 0.0, z), mask)
    bound = WIDE_BOUND if ratio_bound is None else math.log(ratio_bound)
    ratio = token_ratio(logprobs, old_logprobs, mask, bound)
    term = -clipped_surrogate(ratio, z, clip_low, clip_high)
    bounded = jnp.abs(log_ratio(logprobs, old_logprobs, mask)) > bound
    metrics = {
        "filtered_fraction": masked_mean(filtered.astype(mask.dtype), mask),
        "bounded_fraction": masked_mean(bounded.astype(mask.dtype), mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, z, mask, clip_low, clip_high),
    }
    return aggregate(term, mask, "sequence_mean"), metrics


def r1_reward_score(format_ok, correct, consistency):
    """Reward of a judgement: 0.5 format_ok + correct (1 + 0.5 consistency), in [0, 2].

    Args:
      format_ok: 1 if the think and answer tags are there, else 0 (scalar or array).
      correct: 1 if the chosen answer is the preferred one, else 0.
      consistency: 1 if the reasoning agrees with the choice, -1 if it contradicts it, 0 undecided.

    Reference: arXiv 2505.02835; -1 for a contradiction is the code's.
    """
    return 0.5 * format_ok + correct * (1 + 0.5 * consistency)
