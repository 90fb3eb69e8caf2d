"""MinPRO: the token ratio damped by the smallest ratio of its prefix."""

from losses.catalogue import paper
from losses.ops.ratios import BOUND, bounded_exp, log_ratio, smallest_prefix_log_ratio
from losses.surrogates.cispo import weighted_reinforce


@paper(
    "minpro",
    kind="objective",
    base="grpo",
    title="A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization",
    arxiv="2601.22718",
    year=2026,
    metric="weight_mean",
)
def minpro_loss(logprobs, old_logprobs, mask, advantages, *, clip_low=1.0, clip_high=0.28):
    """REINFORCE weighted by the token's ratio times the smallest ratio before it.

        p_it = min over valid j < t of rho_ij            (1 if no valid token precedes)
        w_it = stop_grad clip( p_it rho_it, 1 - clip_low, 1 + clip_high )
        loss = - sum m w A logprobs / sum m

    rho = exp(logprobs - old_logprobs), the log-ratio clamped to +-20. Masked positions are
    transparent; the minimum is taken on log-ratios and no product is formed. The minimum may
    exceed 1.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      clip_low, clip_high: bounds of the weight; clip_low = 1 is no lower bound.

    Returns:
      (loss, metrics).

    Reference: arXiv 2601.22718. The equation is from a survey of the method; a public trainer has a
    hard-clip variant with the prefix detached, which is not this.
    """
    own = log_ratio(logprobs, old_logprobs, mask).clip(-BOUND, BOUND)
    prefix = smallest_prefix_log_ratio(logprobs, old_logprobs, mask).clip(-BOUND, BOUND)
    ratio = bounded_exp(prefix + own, 2 * BOUND)
    return weighted_reinforce(ratio, logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
