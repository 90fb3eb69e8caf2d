"""GSPO with per-token advantages."""

from losses.catalogue import paper
from losses.ops.ratios import capped_exp, sequence_log_ratio, with_value_of
from losses.surrogates.gspo import LOG_CAP, sequence_surrogate


@paper(
    "gspo-token",
    kind="objective",
    title="Group Sequence Policy Optimization (GSPO-token)",
    arxiv="2507.18071",
    year=2025,
    metric="clip_fraction",
)
def gspo_token_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=3e-4, clip_high=4e-4):
    """The sequence's ratio in value, the token's own log-probability in gradient.

        s_it = stop_grad(s_i) exp( logprobs_it - stop_grad(logprobs_it) )
        loss = - mean_i sum_t m_it min( s_it A_it, clip(s_it, ...) A_it ) / |y_i|

    A token is clipped by the sign of its own advantage.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      clip_low, clip_high: the window of s.

    Returns:
      (loss, metrics).

    Reference: Zheng et al. 2025, arXiv 2507.18071, section on GSPO-token.
    """
    s = capped_exp(sequence_log_ratio(logprobs, old_logprobs, mask), LOG_CAP)
    ratio = with_value_of(s[:, None], logprobs)
    return sequence_surrogate(ratio, logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
