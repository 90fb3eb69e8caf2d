"""DISPO: CISPO with a weight window of its own for each sign."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import token_ratio
from losses.surrogates.cispo import weighted_reinforce


@paper(
    "dispo",
    kind="objective",
    base="grpo",
    title="DISPO: Enhancing Training Efficiency and Stability in Reinforcement Learning for Large "
    "Language Model Mathematical Reasoning",
    arxiv="2602.00983",
    year=2026,
    metric="clip_fraction",
)
def dispo_loss(
    logprobs,
    old_logprobs,
    mask,
    advantages,
    *,
    clip_pos_low=0.2,
    clip_pos_high=10,
    clip_neg_low=1,
    clip_neg_high=100,
):
    """REINFORCE with a constant importance weight, clipped by the advantage's sign.

        w_bt = stop_grad clip(r, 1 - clip_pos_low, 1 + clip_pos_high)    if A_bt > 0
               stop_grad clip(r, 1 - clip_neg_low, 1 + clip_neg_high)    otherwise
        loss = - sum m w A logprobs / sum m

    r = exp(logprobs - old_logprobs), the log-ratio clamped to +-20. Every token keeps a gradient.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      clip_pos_low, clip_pos_high, clip_neg_low, clip_neg_high: the two windows; None: no bound.

    Returns:
      (loss, metrics); metrics hold the share of all valid tokens clipped in each of the four ways.

    Reference: arXiv 2602.00983, after a public write-up; one mean over the batch (rather than over
    each prompt's group first) is assumed.
    """
    bounds = [
        jnp.inf if bound is None else bound
        for bound in (clip_pos_low, clip_pos_high, clip_neg_low, clip_neg_high)
    ]
    positive = advantages > 0
    low, high = jnp.where(positive, *bounds[::2]), jnp.where(positive, *bounds[1::2])
    ratio = token_ratio(logprobs, old_logprobs, mask)
    loss, metrics = weighted_reinforce(ratio, logprobs, old_logprobs, advantages, mask, low, high)
    below, above = ratio < 1 - low, ratio > 1 + high
    regimes = {
        "clip_fraction_pos_low": positive & below,
        "clip_fraction_pos_high": positive & above,
        "clip_fraction_neg_low": ~positive & below,
        "clip_fraction_neg_high": ~positive & above,
    }
    shares = {name: masked_mean(hit.astype(mask.dtype), mask) for name, hit in regimes.items()}
    return loss, {**metrics, **shares}
