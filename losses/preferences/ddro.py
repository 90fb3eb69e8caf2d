"""DDRO: pairwise ranking of document identifiers for generative retrieval."""

from losses.arrays import Rows
from losses.catalogue import paper
from losses.ops.masked import masked_sum
from losses.ops.pairs import (
    logistic_loss,
    margin_metrics,
    margins,
    mean_over_pairs,
    pair_table,
    side_metrics,
    table_sides,
)
from losses.ops.ratios import sequence_log_ratio


@paper(
    "ddro",
    kind="objective",
    base="dpo",
    title=(
        "Lightweight and Direct Document Relevance Optimization for "
        "Generative Information Retrieval"
    ),
    arxiv="2504.05181",
    year=2025,
    metric="preference_accuracy",
)
def ddro_loss(logprobs, ref_logprobs, mask, relevant: Rows, group_ids, *, beta=0.4):
    """DPO's loss over all pairs of a relevant and an irrelevant identifier of one query.

        s_i  = beta sum_t m_it (logprobs_it - ref_logprobs_it)
        loss = mean over pairs (i relevant, j not, same query) of -log sigmoid(s_i - s_j)

    The mean is over the pairs of the batch, not per query first. A row without tokens forms no
    pair; no pair at all: loss 0.

    Args:
      logprobs, ref_logprobs, mask: [B,T] of the identifiers; the reference is the supervised model.
      relevant: [B] 1 or 0.
      group_ids: [B] int, the query.
      beta: inverse temperature.

    Returns:
      (loss, metrics).

    Reference: arXiv 2504.05181. Several negatives per query are a generalisation; the released data
    has one.
    """
    score = beta * sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=False)
    pairs = pair_table(relevant, group_ids, mask)
    margin = margins(score)
    metrics = {
        **margin_metrics(margin, pairs),
        **side_metrics(*table_sides(masked_sum(logprobs, mask, axis=-1), pairs)),
    }
    return mean_over_pairs(logistic_loss(margin), pairs), metrics
