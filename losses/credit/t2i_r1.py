"""BiCoT-GRPO: a plan and the work made from it as one trajectory, graded by an ensemble."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.divergences import kl_estimate
from losses.ops.masked import masked_mean, rows_to_tokens
from losses.ops.ratios import WIDE_BOUND, log_ratio, with_value_of


@paper(
    "t2i-r1",
    kind="objective",
    title="T2I-R1: Reinforcing Image Generation with Collaborative Semantic-level and "
    "Token-level CoT",
    arxiv="2505.00703",
    year=2025,
    metric="kl",
)
def bicot_grpo_loss(
    logprobs, ref_logprobs, mask, reward_components, group_ids, *, beta=0.01, eps=1e-4
):
    """On-policy GRPO, token mean over plan and work together, with the rewards summed.

        R_i  = sum_r reward_components_ir,   A_i = (R_i - group mean) / (group std + eps)
        loss = - sum m ( exp(logprobs - stop_grad(logprobs)) A - beta k3 ) / sum m

    k3 = exp(d) - d - 1 with d = ref_logprobs - logprobs. The ratio is 1 in value: one update per
    rollout, no clip. The standard deviation is unbiased; A = 0 where all R of a group agree to
    1e-6. The longer segment has most of the weight.

    Args:
      logprobs, ref_logprobs: [B,T]; plan tokens, then work tokens.
      mask: [B,T] 1 on generated tokens of both kinds.
      reward_components: [B,R] the ensemble's scores of the finished work.
      group_ids: [B].
      beta: weight of the KL term.
      eps: added to the standard deviation.

    Returns:
      (loss, metrics).

    Reference: arXiv 2505.00703 and the authors' code.
    """
    rewards = jnp.sum(reward_components, axis=-1)
    advantages = jnp.where(
        groups.all_equal(rewards, group_ids, tolerance=1e-6),
        0.0,
        groups.standardised(rewards, group_ids, eps=eps),
    )
    advantages = rows_to_tokens(advantages, mask)
    d = jnp.clip(log_ratio(logprobs, ref_logprobs, mask), -WIDE_BOUND, WIDE_BOUND)
    k3 = kl_estimate(d, "k3")
    loss = -masked_mean(with_value_of(jnp.ones_like(mask), logprobs) * advantages - beta * k3, mask)
    metrics = {
        "kl": masked_mean(jax.lax.stop_gradient(k3), mask),
        "advantage_abs": masked_mean(jnp.abs(advantages), mask),
    }
    return loss, metrics
