"""SimPO: average log-probability as reward, with a target margin and no reference."""

from jaxtyping import Array, Int

from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.pairs import logistic_loss, margin_metrics, mean_over_pairs, side_metrics, sides


@paper(
    "simpo",
    kind="objective",
    base="dpo",
    title="SimPO: Simple Preference Optimization with a Reference-Free Reward",
    arxiv="2405.14734",
    year=2024,
    metric="preference_margin",
)
def simpo_loss(
    logprobs,
    mask,
    chosen: Int[Array, "P"],
    rejected: Int[Array, "P"],
    *,
    beta=2.0,
    gamma=0.5,
    label_smoothing=0.0,
):
    """Logistic loss on length-normalised log-probabilities.

        a_i  = sum_t m_it logprobs_it / max(|y_i|, 1)
        z_p  = beta ( a_chosen[p] - a_rejected[p] ) - gamma
        loss = mean_p [ -(1 - label_smoothing) log sigmoid(z) - label_smoothing log sigmoid(-z) ]

    Args:
      logprobs, mask: [B,T].
      chosen, rejected: [P] int, the rows of each pair's responses.
      beta: inverse temperature.
      gamma: target margin (the authors set gamma / beta in [0, 1]).
      label_smoothing: share of flipped labels assumed.

    Returns:
      (loss, metrics); the logged log-probabilities are per token.

    Reference: Meng et al. 2024, arXiv 2405.14734.
    """
    better, worse = sides(masked_mean(logprobs, mask, axis=-1), chosen, rejected)
    margin = beta * (better - worse) - gamma
    metrics = {**margin_metrics(margin), **side_metrics(better, worse)}
    return mean_over_pairs(logistic_loss(margin, label_smoothing)), metrics
