"""Decoupled PPO: clip around a proximal policy, weigh by the behaviour policy."""

from losses.baselines.dapo import dapo_loss
from losses.catalogue import paper
from losses.ops.masked import masked_mean, select
from losses.surrogates.mis import mis_credit
from losses.surrogates.tis import mismatch_ratio


@paper(
    "decoupled-ppo",
    kind="objective",
    base="ppo",
    title="AReaL: A Large-Scale Asynchronous RL System for Language Reasoning (decoupled PPO)",
    arxiv="2505.24298",
    year=2025,
    metric="behaviour_weight_mean",
)
def decoupled_ppo_loss(
    logprobs,
    old_logprobs,
    sampler_logprobs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    behav_cap=5.0,
):
    """The clipped surrogate around the proximal policy, weighted proximal/behaviour.

        w    = exp(old_logprobs - sampler_logprobs),   keep = m [w <= behav_cap]
        loss = - sum keep w min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) / sum m

    The denominator counts the original mask; w and A are constants. Since the surrogate is
    positively homogeneous in A, this is `dapo_loss` on the advantages of `mis_credit`.

    Args:
      logprobs, old_logprobs, sampler_logprobs, advantages, mask: [B,T]; old is the proximal policy,
        sampler the behaviour policy.
      clip_low, clip_high: window of exp(logprobs - old_logprobs).
      behav_cap: tokens with a larger w are dropped; None keeps all (the paper has no cap).

    Returns:
      (loss, metrics).

    Reference: Fu et al. 2025, arXiv 2505.24298; AReaL's default cap.
    """
    weighted = mis_credit(
        advantages, old_logprobs, sampler_logprobs, mask, low=None, high=behav_cap
    )
    loss, metrics = dapo_loss(
        logprobs, old_logprobs, weighted, mask, clip_low=clip_low, clip_high=clip_high
    )
    weight = select(mismatch_ratio(old_logprobs, sampler_logprobs, mask, "token"), mask)
    return loss, {"behaviour_weight_mean": masked_mean(weight, mask), **metrics}
