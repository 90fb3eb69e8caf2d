"""REINFORCE for search: shaped rewards of the best rows, a baseline, no ratio."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops.masked import lengths, masked_mean, masked_sum
from losses.ops.options import check_option
from losses.ops.order import rank

BASELINES = ("mab", "loo", "none")
LEAST_SURPRISE = -1e-6


@paper(
    "acegen-reinforce",
    kind="objective",
    title="REINFORCE-ING Chemical Language Models for Drug Discovery",
    year=2025,
    metric="shaped_reward",
)
def acegen_reinforce_loss(
    logprobs,
    ref_logprobs,
    mask,
    rewards,
    baseline_state: Float[Array, "2"],
    *,
    alpha=5.0,
    sigma=0.005,
    top_k=0.5,
    baseline="mab",
    likely_penalty=0.0,
):
    """REINFORCE on the best rows, with the prior's likelihood in a reward raised to a power.

        S    = the k = max(1, floor(B top_k)) rows of highest reward    (of equal ones the earlier)
        R_i  = max( r_i + sigma sum_t m ref_logprobs_it, 0 )^alpha
        loss = mean_S( -ll_i (R_i - b_i) ) - likely_penalty mean_S( 1 / min(ll_i, -1e-6) )
        ll_i = sum_t m logprobs_it;  the second mean leaves out rows without tokens

    Baseline b, over S: "mab" the running mean of R, this batch included; "loo" the mean of the
    other rows' R (0 for k = 1); "none" 0. Rows outside S are not used at all. Whoever replays old
    rows selects the fresh ones outside, appends, and calls with top_k = 1.

    Args:
      logprobs, ref_logprobs, mask: [B,T]; the reference is the pre-trained prior.
      rewards: [B] in [0, 1].
      baseline_state: [2] running mean and count, (0, 0.001) at first.
      alpha: power of the shaped reward.
      sigma: weight of the prior's log-likelihood.
      top_k: share of rows kept; >= 1 keeps all.
      baseline: "mab", "loo" or "none".
      likely_penalty: weight of the term against certain sequences.

    Returns:
      (loss, metrics); metrics["baseline_state"] [2] is the next state ("mab" changes it).

    Raises:
      ValueError: unknown baseline.

    Reference: Thomas et al. 2025, J. Chem. Inf. Model. 65(23); acegen-open, whose top_k counts the
    configured batch size where rows are counted here.
    """
    check_option("baseline", baseline, BASELINES)
    size = rewards.shape[0]
    k = min(size, max(1, math.floor(size * top_k)))
    chosen = (rank(rewards, jnp.ones_like(rewards)) < k).astype(mask.dtype)
    likelihood = masked_sum(logprobs, mask, axis=1)
    prior = masked_sum(ref_logprobs, mask, axis=1)
    shaped = jnp.maximum(rewards + sigma * prior, 0.0) ** alpha
    mean = masked_mean(shaped, chosen)

    state = baseline_state
    if baseline == "mab":
        total = baseline_state[1] + k
        running = baseline_state[0] + (mean - baseline_state[0]) * k / total
        b, state = running, jnp.stack([running, total])
    elif baseline == "loo":
        b = (k * mean - shaped) / (k - 1) if k > 1 else jnp.zeros_like(shaped)
    else:
        b = jnp.zeros_like(shaped)

    loss = masked_mean(-likelihood * (shaped - b), chosen)
    if likely_penalty:
        held = jnp.where(likelihood < LEAST_SURPRISE, likelihood, LEAST_SURPRISE)
        loss = loss - likely_penalty * masked_mean(1 / held, chosen * (lengths(mask) > 0))
    metrics = {
        "shaped_reward": mean,
        "baseline": masked_mean(jnp.broadcast_to(b, shaped.shape), chosen),
        "kept_fraction": jnp.mean(chosen),
        "surprisal": -masked_mean(jax.lax.stop_gradient(logprobs), mask),
        "baseline_state": state,
    }
    return loss, metrics
