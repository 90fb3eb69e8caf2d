"""DAPO: clip-higher, token mean, no KL."""

from losses.baselines.grpo import grpo_loss
from losses.catalogue import paper


@paper(
    "dapo",
    kind="objective",
    title="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    arxiv="2503.14476",
    year=2025,
    metric="clip_fraction",
)
def dapo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=0.2, clip_high=0.28):
    """The clipped surrogate with a wider upper bound, averaged over the batch's tokens.

        loss = - sum_it m_it min( r_it A_it, clip(r_it, 1 - clip_low, 1 + clip_high) A_it ) / sum m

    The denominator counts every valid token of the (global) batch; no valid token: 0. No KL and no
    dual clip (verl's recipe adds one at 10; the paper's formula has none).

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      clip_low, clip_high: the ratio's window is [1 - clip_low, 1 + clip_high].

    Returns:
      (loss, metrics).

    Reference: Yu et al. 2025, arXiv 2503.14476.
    """
    return grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        beta=0.0,
        aggregation="token_mean",
    )
