"""Inverse-Q*: regression of implicit token rewards on those of an instructed reference."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import log_ratio


@paper(
    "inverse-q-star",
    kind="objective",
    title=(
        "Inverse-Q*: Token Level Reinforcement Learning for Aligning Large Language Models "
        "Without Preference Data"
    ),
    arxiv="2408.14874",
    year=2024,
    metric="agreement",
)
def inverse_q_star_loss(
    logprobs, ref_logprobs, teacher_logprobs, mask, *, beta=0.1, eta=1.0, reward_clip=None
):
    """Squared distance between the policy's implicit token reward and an estimate of the optimum's.

        rhat_t = clip( beta (teacher_logprobs_t - ref_logprobs_t), -reward_clip, reward_clip )
        r_t    = beta (logprobs_t - ref_logprobs_t)
        loss   = sum m (r - eta rhat)^2 / max(sum m, 1)

    No pairs, no reward model, no groups; old samples may be reused, since the target is fixed.

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      teacher_logprobs: [B,T] under the frozen reference with an extra instruction in its prompt.
      beta: inverse temperature.
      eta: 1 imitates the estimate, above 1 extrapolates beyond it.
      reward_clip: bound on |rhat|, before eta; None: none.

    Returns:
      (loss, metrics).

    Reference: arXiv 2408.14874; the squared error, its mean and the defaults are assumptions.
    """
    estimate = beta * log_ratio(teacher_logprobs, ref_logprobs, mask)
    if reward_clip is not None:
        estimate = jnp.clip(estimate, -reward_clip, reward_clip)
    reward = beta * log_ratio(logprobs, ref_logprobs, mask)
    agree = ((reward > 0) == (estimate > 0)).astype(mask.dtype)
    metrics = {
        "reward_hat_mean": masked_mean(estimate, mask),
        "reward_mean": masked_mean(jax.lax.stop_gradient(reward), mask),
        "agreement": masked_mean(agree, mask),
    }
    return masked_mean((reward - eta * estimate) ** 2, mask), metrics
