"""RLMEC: token rewards of a rewriting reward model, and imitation of the edited solution."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops.masked import count, masked_mean, masked_sum, select
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clipped_side, clipped_surrogate


def rlmec_token_rewards(grm_logprobs, correct, mask):
    """Token rewards from the generative reward model, [B,T].

        correct: r = clip(p - 0.5, 0, 0.5),   wrong: r = clip(p - 0.5, -0.1, 0),   p = exp(logprob)

    Args:
      grm_logprobs: [B,T] the reward model's log-probability of the policy's token, given problem,
        reference solution and prefix.
      correct: [B] 1 where the final answer is right, else 0.
      mask: [B,T].
    """
    offset = jnp.exp(select(grm_logprobs, mask)) - 0.5
    right = jnp.clip(offset, 0.0, 0.5)
    wrong = jnp.clip(offset, -0.1, 0.0)
    return select(jnp.where(jnp.asarray(correct)[:, None] > 0, right, wrong), mask)


@paper(
    "rlmec",
    kind="objective",
    title="Improving Large Language Models via Fine-grained Reinforcement Learning with Minimum "
    "Editing Constraint",
    arxiv="2401.06081",
    year=2024,
    gradients=("logprobs", "edit_logprobs"),
    metric="imitation_loss",
)
def rlmec_loss(
    logprobs,
    old_logprobs,
    token_rewards,
    mask,
    edit_logprobs: Float[Array, "B S"],
    edit_weights: Float[Array, "B S"],
    *,
    clip_low=0.3,
    clip_high=0.3,
    lam=1.0,
):
    """REINFORCE on clipped, weighted token rewards plus weighted imitation of the minimal edit.

        c_t  = stop_grad min( rho r, clip(rho, 1 - clip_low, 1 + clip_high) r )
        L_rl = - sum m c logprobs / #{m = 1, r != 0}
        L_im = - sum edit_weights edit_logprobs / #{edit_weights != 0}
        loss = L_rl + lam L_im

    rho = exp(logprobs - old_logprobs), r = token_rewards. The clip caps the gradient and never
    stops it. Both counts run over the batch and are at least 1. The imitation term does not read
    the mask: the edit of a fully masked row counts unless its weights are 0.

    Args:
      logprobs, mask: [B,T].
      old_logprobs: [B,T] under the model that produced the solutions.
      token_rewards: [B,T] of `rlmec_token_rewards`.
      edit_logprobs: [B,S] of the edited solution's tokens under the policy; differentiable.
      edit_weights: [B,S] 1 on inserted or changed tokens, 0.5 on kept ones, 0 on padding.
      clip_low, clip_high: window of rho in c.
      lam: weight of the imitation.

    Returns:
      (loss, metrics).

    Reference: arXiv 2401.06081 and the authors' code.
    """
    ratio = jax.lax.stop_gradient(token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND))
    c = clipped_surrogate(ratio, token_rewards, clip_low, clip_high)
    rewarded = mask * (token_rewards != 0)
    policy = -masked_sum(c * logprobs, rewarded) / count(rewarded)
    weighted = (edit_weights != 0).astype(mask.dtype)
    imitation = -masked_sum(edit_weights * select(edit_logprobs, weighted), weighted)
    imitation = imitation / count(weighted)
    clipped = clipped_side(ratio, token_rewards, clip_low, clip_high).astype(mask.dtype)
    metrics = {
        "policy_loss": jax.lax.stop_gradient(policy),
        "imitation_loss": jax.lax.stop_gradient(imitation),
        "clip_fraction": masked_mean(clipped, rewarded),
    }
    return policy + lam * imitation, metrics
