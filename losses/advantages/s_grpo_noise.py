"""S-GRPO (stable): advantages weighted for rewards that flip with a known probability."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups

EPS = 1e-8


@paper(
    "s-grpo-noise",
    kind="advantage",
    base="grpo",
    title="Mitigating Think-Answer Mismatch in LLM Reasoning Through Noise-Aware Advantage "
    "Reweighting",
    year=2025,
    stages={"objective": "dr_grpo_loss"},
)
def s_grpo_noise_advantage(rewards, group_ids, *, p=0.10):
    """The normalised advantage times the optimal weight under label noise, [B].

        q   = share of the group's rewards > 0,   t = clip((q - p) / (1 - 2 p), 0, 1)
        w   = (1 - 2 p) t (1 - t) / ( sqrt(q (1 - q) + 1e-8) sqrt(t (1 - t) + 1e-8) )
        A_i = w (r_i - mean) / (std + 1e-8)                               std unbiased

    w is 0 in groups no more balanced than the noise itself, q <= p or q >= 1 - p.

    Args:
      rewards: [B]; success is r > 0.
      group_ids: [B] int.
      p: probability that a reward is flipped, in [0, 0.5).

    Returns:
      advantages [B], constant.

    Raises:
      ValueError: p outside [0, 0.5).

    Reference: shenpeijun0212/S-GRPO, 2025. Its base is Dr. GRPO's loss, yet the code divides by the
    standard deviation before weighting.
    """
    if not 0 <= p < 0.5:
        raise ValueError(f"p = {p!r} is no probability of a flip: expected 0 <= p < 0.5.")
    q = groups.group_mean((rewards > 0).astype(rewards.dtype), group_ids)
    t = jnp.clip((q - p) / (1 - 2 * p), 0.0, 1.0)
    spread = t * (1 - t)
    weight = (1 - 2 * p) * spread / (jnp.sqrt(q * (1 - q) + EPS) * jnp.sqrt(spread + EPS))
    return weight * groups.standardised(rewards, group_ids, eps=EPS)
