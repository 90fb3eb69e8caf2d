"""LOOP: a leave-one-out baseline with PPO's clipped ratio."""

import jax.numpy as jnp

from losses.baselines.grpo import grpo_loss
from losses.baselines.rloo import rloo_advantage
from losses.catalogue import paper
from losses.ops.masked import masked_mean, rows_to_tokens


@paper(
    "loop",
    kind="objective",
    title="A Simple and Effective Reinforcement Learning Method for Text-to-Image Diffusion "
    "Fine-tuning (LOOP)",
    arxiv="2503.00897",
    year=2025,
    metric="clip_fraction",
)
def loop_loss(logprobs, old_logprobs, mask, rewards, group_ids, *, clip_low=0.2, clip_high=0.2):
    """RLOO's advantage under the clipped surrogate: no critic, no standard deviation, no KL.

        A_b  = rewards_b - mean of the other rewards of its group      (group of one: rewards_b)
        loss = - mean_b (1/|m_b|) sum_t m min( r A, clip(r, 1 - clip_low, 1 + clip_high) A )

    r = exp(logprobs - old_logprobs), the log-ratio clamped to +-20. A fully masked row adds 0 and
    counts in B, its reward in its group. For a diffusion model the positions are the denoising
    steps.

    Args:
      logprobs, old_logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      clip_low, clip_high: the ratio's window; None: no bound.

    Returns:
      (loss, metrics).

    Reference: arXiv 2503.00897, built from the abstract; the clip range and the mean over steps
    (rather than their sum) are assumed.
    """
    advantages = rows_to_tokens(rloo_advantage(rewards, group_ids), mask)
    loss, metrics = grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        beta=0.0,
    )
    return loss, {"advantage_abs": masked_mean(jnp.abs(advantages), mask), **metrics}
