"""MOPD: several specialists distilled into one student, each on the prompts of its domain."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from losses.catalogue import CatalogueError, nearest, paper
from losses.ops.masked import aggregate, masked_mean
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio
from losses.ops.surrogates import ratio_metrics


@paper(
    "mopd",
    kind="objective",
    base="opd",
    title="MiMo-V2-Flash Technical Report (Multi-Teacher On-Policy Distillation)",
    arxiv="2601.02780",
    year=2026,
    metric="kept_fraction",
)
def mopd_loss(
    logprobs,
    old_logprobs,
    sampler_logprobs,
    teacher_logprobs,
    advantages,
    mask,
    *,
    w_low=0.2,
    w_high=5.0,
    orm_coef=0.0,
):
    """REINFORCE on the gap to the teacher of the row's domain, gated by the sampler mismatch.

        w_t  = exp(old_logprobs_t - sampler_logprobs_t),  0 outside [w_low, w_high]
        A_t  = teacher_logprobs_t - old_logprobs_t + orm_coef advantages_t
        loss = - mean_i ( sum_t m stop_grad(w_t A_t) logprobs_t / sum_t m )

    Tokens outside the gate are dropped, not clipped, and stay in the denominator; a weight at a
    bound, to rounding, is kept.

    Args:
      logprobs, old_logprobs, sampler_logprobs, mask: [B,T].
      teacher_logprobs: [B,T], each row under the teacher of its domain (`teacher_of`).
      advantages: [B,T] of the outcome; with orm_coef = 0 they have no effect.
      w_low, w_high: gate on the trainer/sampler ratio; None: no bound on that side.
      orm_coef: weight of the outcome advantage.

    Returns:
      (loss, metrics).

    Reference: arXiv 2601.02780; NVIDIA-NeMo/RL. The mean per sequence is assumed.
    """
    weight = token_ratio(old_logprobs, sampler_logprobs, mask, WIDE_BOUND)
    slack = 32 * jnp.finfo(weight.dtype).eps
    low = 0.0 if w_low is None else w_low * (1 - slack)
    high = jnp.inf if w_high is None else w_high * (1 + slack)
    kept = (weight >= low) & (weight <= high)
    weight = jnp.where(kept, weight, 0.0)
    gap = log_ratio(teacher_logprobs, old_logprobs, mask)
    term = weight * (gap + orm_coef * advantages) * logprobs
    metrics = {
        "kept_fraction": masked_mean(kept.astype(mask.dtype), mask),
        "weight_mean": masked_mean(weight, mask),
        "teacher_kl": -masked_mean(gap, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return -aggregate(term, mask, "sequence_mean"), metrics


def teacher_of(domain: str, teachers: Mapping[str, Any], default: Any = None) -> Any:
    """Returns the teacher of a domain.

    Args:
      domain: of the prompt.
      teachers: domain -> teacher; domains may share one.
      default: the teacher of domains that the table does not name; None: none has.

    Raises:
      CatalogueError: the table does not name the domain and there is no default.
    """
    found = teachers.get(domain, default)
    if found is None:
        raise CatalogueError(
            f"No teacher for the domain {domain!r}.{nearest(domain, list(teachers))} "
            f"Domains: {', '.join(map(str, teachers)) or 'none'}."
        )
    return found
