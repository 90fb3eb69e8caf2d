"""W-REINFORCE: right answers raised a tenth as much as wrong ones are lowered."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.options import check_option
from losses.ops.surrogates import clipped_token_mean

MODES = ("weighted", "psr", "nsr")


@paper(
    "w-reinforce",
    kind="objective",
    base="ppo",
    title="The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning",
    arxiv="2506.01347",
    year=2025,
    metric="kept_fraction",
)
def w_reinforce_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    *,
    mode="weighted",
    lam=0.1,
    clip_low=0.2,
    clip_high=0.2,
):
    """The clipped surrogate on fixed advantages of right and wrong responses.

        mode="weighted"  A_i = lam if right (reward 1), -1 if wrong (reward 0), else the reward
        mode="psr"       A_i = 1 on right responses, all others removed
        mode="nsr"       A_i = -1 on wrong responses, all others removed
        loss = - sum_kept m min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) / sum_kept m

    No groups, no baseline. Removed responses leave the denominator too; nothing left: loss 0.

    Args:
      logprobs, old_logprobs, mask: [B,T].
      rewards: [B] 1 or 0, compared exactly.
      mode: "weighted", "psr" (positive samples) or "nsr" (negative samples).
      lam: advantage of a right response under "weighted".
      clip_low, clip_high: window of the ratio.

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown mode.

    Reference: Zhu et al. 2025, arXiv 2506.01347.
    """
    check_option("mode", mode, MODES)
    right, wrong = rewards == 1, rewards == 0
    keep = {"psr": right, "nsr": wrong, "weighted": jnp.ones_like(right)}[mode]
    positive = lam if mode == "weighted" else 1.0
    advantages = jnp.where(right, positive, jnp.where(wrong, -1.0, rewards))
    kept = mask * keep[:, None]
    loss, metrics = clipped_token_mean(
        logprobs, old_logprobs, advantages, kept, clip_low=clip_low, clip_high=clip_high
    )
    return loss, {**metrics, "kept_fraction": jnp.mean(keep.astype(mask.dtype))}
