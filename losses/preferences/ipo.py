"""IPO: preference margins regressed to a finite target."""

from jaxtyping import Array, Int

from losses.catalogue import paper
from losses.ops.masked import masked_sum
from losses.ops.pairs import margin_metrics, mean_over_pairs, side_metrics, sides
from losses.ops.ratios import sequence_log_ratio


@paper(
    "ipo",
    kind="objective",
    base="dpo",
    title="A General Theoretical Paradigm to Understand Learning from Human Preferences (IPO)",
    arxiv="2310.12036",
    year=2023,
    metric="preference_margin",
)
def ipo_loss(
    logprobs,
    ref_logprobs,
    mask,
    chosen: Int[Array, "P"],
    rejected: Int[Array, "P"],
    *,
    beta=0.1,
    length_normalize=True,
):
    """Squared distance of the log-ratio margin from 1 / (2 beta).

        h_i  = sum_t m_it (logprobs_it - ref_logprobs_it)       / max(|y_i|, 1) if length_normalize
        loss = mean_p ( h_chosen[p] - h_rejected[p] - 1 / (2 beta) )^2

    Overshooting costs as much as undershooting, so the KL to the reference stays bounded.

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      chosen, rejected: [P] int, the rows of each pair's responses.
      beta: the paper's tau.
      length_normalize: True as TRL reports from the authors; False is the formula as printed.

    Returns:
      (loss, metrics).

    Reference: Azar et al. 2023, arXiv 2310.12036; TRL.
    """
    h = sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=length_normalize)
    better, worse = sides(h, chosen, rejected)
    margin = better - worse
    metrics = {
        **margin_metrics(margin),
        **side_metrics(*sides(masked_sum(logprobs, mask, axis=-1), chosen, rejected)),
    }
    return mean_over_pairs((margin - 1 / (2 * beta)) ** 2), metrics
