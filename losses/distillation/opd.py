"""On-policy distillation from sampled tokens."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio
from losses.ops.surrogates import ratio_metrics


@paper(
    "opd",
    kind="advantage",
    base="ppo",
    title="On-Policy Distillation (Thinking Machines Lab)",
    year=2025,
    companion=True,
)
def opd_advantage(old_logprobs, teacher_logprobs, mask, *, kl_coef=1.0, adv_clip=None):
    """The gap to the teacher at each token: A = kl_coef (teacher_logprobs - old_logprobs), [B,T].

    Args:
      old_logprobs, teacher_logprobs, mask: [B,T] of the student's own tokens.
      kl_coef: weight.
      adv_clip: bound on |A|, after kl_coef; None: none.
    """
    advantages = kl_coef * log_ratio(teacher_logprobs, old_logprobs, mask)
    return advantages if adv_clip is None else jnp.clip(advantages, -adv_clip, adv_clip)


@paper(
    "opd",
    kind="objective",
    title="On-Policy Distillation (Thinking Machines Lab)",
    year=2025,
    metric="teacher_kl",
)
def opd_loss(
    logprobs,
    old_logprobs,
    teacher_logprobs,
    mask,
    *,
    kl_coef=1.0,
    adv_clip=None,
    aggregation="token_mean",
    max_length=None,
):
    """The per-token reverse KL to a teacher as (negative) reward of the token.

        A_it = kl_coef (teacher_logprobs_it - old_logprobs_it)       constant, clipped to +-adv_clip
        loss = - agg( exp(logprobs - old_logprobs) A )

    Discount 0: nothing is summed over the future. No baseline, no whitening, no clip on the
    ratio; its exponent is held only where it would overflow (+-80).

    Args:
      logprobs, old_logprobs, teacher_logprobs, mask: [B,T] of the student's own tokens.
      kl_coef: weight.
      adv_clip: bound on |A|, after kl_coef; None: none.
      aggregation: of the token terms; `max_length` is for "constant" only.

    Returns:
      (loss, metrics); metrics["teacher_kl"] is the mean of old - teacher, nats per token.

    Reference: Thinking Machines Lab 2025 (post). Aggregation and clipping are ours to choose.
    """
    gap = log_ratio(teacher_logprobs, old_logprobs, mask)
    advantages = opd_advantage(
        old_logprobs, teacher_logprobs, mask, kl_coef=kl_coef, adv_clip=adv_clip
    )
    term = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND) * advantages
    metrics = {
        "teacher_kl": -masked_mean(gap, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return -aggregate(term, mask, aggregation, max_length), metrics
