"""Direct preference optimisation."""

from jaxtyping import Array, Int

from losses.catalogue import paper
from losses.ops.masked import masked_sum
from losses.ops.pairs import logistic_loss, margin_metrics, mean_over_pairs, side_metrics, sides
from losses.ops.ratios import sequence_log_ratio


@paper(
    "dpo",
    kind="objective",
    title="Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    arxiv="2305.18290",
    year=2023,
    metric="preference_margin",
)
def dpo_loss(
    logprobs,
    ref_logprobs,
    mask,
    chosen: Int[Array, "P"],
    rejected: Int[Array, "P"],
    *,
    beta=0.1,
    label_smoothing=0.0,
):
    """Logistic loss on the difference of the pair's implicit rewards.

        h_i  = sum_t m_it (logprobs_it - ref_logprobs_it)
        z_p  = beta ( h_chosen[p] - h_rejected[p] )
        loss = mean_p [ -(1 - label_smoothing) log sigmoid(z) - label_smoothing log sigmoid(-z) ]

    Sums over tokens, not means. A fully masked row has h = 0; a row in several pairs gets the sum
    of their gradients; no pair: loss 0.

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      chosen, rejected: [P] int, the rows of each pair's responses.
      beta: inverse temperature.
      label_smoothing: share of flipped labels assumed (conservative DPO).

    Returns:
      (loss, metrics).

    Reference: Rafailov et al. 2023, arXiv 2305.18290.
    """
    h = sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=False)
    better, worse = sides(h, chosen, rejected)
    margin = beta * (better - worse)
    metrics = {
        **margin_metrics(margin),
        **side_metrics(*sides(masked_sum(logprobs, mask, axis=-1), chosen, rejected)),
    }
    return mean_over_pairs(logistic_loss(margin, label_smoothing)), metrics
