"""IW-OPD: distillation advantages weighted by how much of the discrepancy is still ahead."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "iw-opd",
    kind="objective",
    base="opd",
    title="On the Position Bias of On-Policy Distillation",
    arxiv="2606.22600",
    year=2026,
    metric="weight_mean",
)
def iw_opd_loss(
    logprobs,
    old_logprobs,
    teacher_logprobs,
    mask,
    *,
    gamma=0.5,
    clip_low=0.2,
    clip_high=0.2,
    eps=1e-8,
):
    """Sampled-token distillation that trusts the teacher less the further the rollout has drifted.

        A_t  = teacher_logprobs_t - old_logprobs_t
        w_t  = 1 + gamma ( 1 - sum_{u < t} |A_u| / max(sum_u |A_u|, eps) )       of the row
        loss = - sum m min( rho w A, clip(rho, 1 - clip_low, 1 + clip_high) w A ) / sum m
        loss = - sum m logprobs w A / sum m                               both bounds None

    rho = exp(logprobs - old_logprobs); w and A constant. 1 + gamma at the first token, never
    below 1.

    Args:
      logprobs, old_logprobs, teacher_logprobs, mask: [B,T] of the student's own tokens.
      gamma: extra weight of the first token.
      clip_low, clip_high: the ratio's window; both None: no ratio (TRL's loss).
      eps: guards the division only.

    Returns:
      (loss, metrics).

    Raises:
      ValueError: one bound given and the other None.

    Reference: arXiv 2606.22600, Algorithm 1, read through TRL; the token mean is TRL's.
    """
    if (clip_low is None) != (clip_high is None):
        raise ValueError(
            f"Give both clip_low and clip_high, or neither; got {clip_low} and {clip_high}."
        )
    advantages = log_ratio(teacher_logprobs, old_logprobs, mask)
    gaps = jnp.abs(advantages)
    before = jnp.cumsum(jnp.pad(gaps[:, :-1], ((0, 0), (1, 0))), axis=-1)
    total = jnp.maximum(jnp.sum(gaps, axis=-1, keepdims=True), eps)
    weight = 1 + gamma * (1 - before / total)
    weighted = weight * advantages
    metrics = {
        "weight_mean": masked_mean(weight, mask),
        "teacher_kl": -masked_mean(advantages, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    if clip_low is None:
        return -masked_mean(weighted * logprobs, mask), metrics
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    metrics |= clip_metrics(ratio, weighted, mask, clip_low, clip_high)
    return -masked_mean(clipped_surrogate(ratio, weighted, clip_low, clip_high), mask), metrics
