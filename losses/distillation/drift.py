"""DRIFT: each problem's pass rate decides what its rollouts are used for."""

import math

import jax
import jax.numpy as jnp

from losses.arrays import Rows
from losses.catalogue import paper
from losses.ops.divergences import entropy_of, jensen_shannon, log_softmax, of_token
from losses.ops.masked import masked_mean
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


def drift_tokens(logits, teacher_logits, tokens):
    """Log-probability of the token, JSD to the teacher and uncertainty gap of each position."""
    student, teacher = log_softmax(logits), log_softmax(teacher_logits)
    gap = jnp.maximum(entropy_of(student) - entropy_of(teacher), 0)
    return {
        "logprobs": of_token(student, tokens),
        "divergence": jensen_shannon(teacher, student),
        "uncertainty": jax.lax.stop_gradient(gap) / math.log(max(logits.shape[-1], 2)),
    }


def drift_mean(
    logprobs,
    divergence,
    uncertainty,
    old_logprobs,
    advantages,
    pass_rate,
    demo_mask,
    mask,
    *,
    low=0.3,
    high=0.8,
    easy_weight=0.2,
    gate_gain=1.0,
    distill_coef=1.0,
    clip_low=0.2,
    clip_high=0.2,
):
    """Routes the rows and averages their losses over the tokens of the batch."""
    hard = (pass_rate < low) & (demo_mask > 0)
    easy = ~hard & (pass_rate >= high)
    boundary = ~hard & ~easy & (pass_rate >= low)

    gated = boundary[:, None] & (advantages > 0)
    gate = jnp.where(gated, 1 + gate_gain * uncertainty, 1.0)
    weighted = advantages * gate * jnp.where(easy, easy_weight, 1.0)[:, None]
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    surrogate = clipped_surrogate(ratio, weighted, clip_low, clip_high)
    term = jnp.where(hard[:, None], distill_coef * divergence, -surrogate)

    explored = mask * ~hard[:, None]
    metrics = {
        "hard_fraction": jnp.mean(hard.astype(mask.dtype)),
        "boundary_fraction": jnp.mean(boundary.astype(mask.dtype)),
        "easy_fraction": jnp.mean(easy.astype(mask.dtype)),
        "gate_mean": masked_mean(gate, mask * boundary[:, None]),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, weighted, explored, clip_low, clip_high),
    }
    return masked_mean(term, mask), metrics


@paper(
    "drift",
    kind="objective",
    base="grpo",
    title="DRIFT (online self-evolution with Difficulty Routing and Rhythm Gating)",
    arxiv="2606.30345",
    year=2026,
    split=(drift_tokens, drift_mean),
    metric="hard_fraction",
)
def drift_loss(
    logits,
    teacher_logits,
    tokens,
    old_logprobs,
    advantages,
    pass_rate: Rows,
    demo_mask: Rows,
    mask,
    *,
    low=0.3,
    high=0.8,
    easy_weight=0.2,
    gate_gain=1.0,
    distill_coef=1.0,
    clip_low=0.2,
    clip_high=0.2,
):
    """Distillation on hard problems, gated exploration at the boundary, little on mastered ones.

        route = hard if pass_rate < low and demo; else easy if pass_rate >= high;
                else boundary if pass_rate >= low; else plain
        J_t   = ( KL(T || M) + KL(S || M) ) / 2,  M = (S + T) / 2
        u_t   = max(0, H(S_t) - H(T_t)) / log V                                   constant
        a_t   = A_t (easy_weight if easy) (1 + gate_gain u_t if boundary and A_t > 0)
        l_t   = distill_coef J_t  on hard rows
                - min( rho a, clip(rho, 1 - clip_low, 1 + clip_high) a )  on all others
        loss  = sum m l / sum m

    rho = exp(log S[token] - old_logprobs). Hard rows ignore their advantage.

    Args:
      logits: [B,T,V].
      teacher_logits: [B,T,V] of a frozen copy with a stored success of the problem in its prompt.
      tokens: [B,T] int, the sampled tokens.
      old_logprobs, advantages: [B,T].
      pass_rate: [B] running pass rate of the row's problem, in [0, 1].
      demo_mask: [B] 1 if a stored success exists.
      mask: [B,T].
      low, high: pass rates that bound the boundary region, low included, high not.
      easy_weight, gate_gain, distill_coef: weights of the branches.
      clip_low, clip_high: the ratio's window.

    Returns:
      (loss, metrics).

    Reference: arXiv 2606.30345, read in a summary: gate, thresholds and weights are assumptions.
    """
    return drift_mean(
        old_logprobs=old_logprobs,
        advantages=advantages,
        pass_rate=pass_rate,
        demo_mask=demo_mask,
        mask=mask,
        low=low,
        high=high,
        easy_weight=easy_weight,
        gate_gain=gate_gain,
        distill_coef=distill_coef,
        clip_low=clip_low,
        clip_high=clip_high,
        **drift_tokens(logits, teacher_logits, tokens),
    )
