"""Dr. GRPO: GRPO without its two normalisations."""

from losses.baselines.grpo import grpo_loss
from losses.catalogue import paper


@paper(
    "dr-grpo",
    kind="objective",
    title="Understanding R1-Zero-Like Training: A Critical Perspective (Dr. GRPO)",
    arxiv="2503.20783",
    year=2025,
    stages={"advantage": ("grpo_advantage", {"scale": "none"})},
    metric="clip_fraction",
)
def dr_grpo_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low=0.2, clip_high=0.2, max_length=3000
):
    """The clipped surrogate over a constant denominator: no length bias, no difficulty bias.

        loss = - sum_it m_it min( r_it A_it, clip(r_it, ...) A_it ) / (B max_length)

    Advantages are reward minus group mean, unscaled (`grpo_advantage(scale="none")`). The constant
    is B times the run's generation limit, as in TRL; verl's mode of that name divides by T only.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      clip_low, clip_high: the ratio's window is [1 - clip_low, 1 + clip_high].
      max_length: the run's generation limit in tokens, a constant of the run.

    Returns:
      (loss, metrics).

    Reference: Liu et al. 2025, arXiv 2503.20783.
    """
    return grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        beta=0.0,
        aggregation="constant",
        max_length=max_length,
    )
