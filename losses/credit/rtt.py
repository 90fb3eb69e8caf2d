"""RTT: verdicts on several criteria, brought to tokens by their relevance to each criterion."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import masked_max, masked_min, masked_sum, select
from losses.ops.options import check_option

NORMS = ("intra_sample", "group")


@paper(
    "rtt",
    kind="advantage",
    base="grpo",
    title="Rubrics to Tokens: Bridging Response-level Rubrics and Token-level Rewards in "
    "Instruction Following Tasks",
    arxiv="2604.02795",
    year=2026,
    stages={
        "objective": ("grpo_loss", {"clip_high": 0.27, "beta": 0.0, "aggregation": "token_mean"})
    },
)
def rtt_advantage(
    rewards,
    rubric_scores: Float[Array, "B R"],
    relevance: Float[Array, "B R T"],
    group_ids,
    mask,
    *,
    weight=0.5,
    norm="intra_sample",
    eps=1e-6,
):
    """Group advantage plus the mean over criteria of normalised relevance times verdict.

        x_irt = relevance_irt rubric_scores_ir,   n_irt = (x_irt - mean) / (std + eps)
        out   = A_i + weight (1/R) sum_r n_irt

    Mean and population standard deviation are per criterion, over the valid tokens of the response
    ("intra_sample") or of the group ("group"); n = 0 where all x of its pool agree to 1e-6. A is
    the group-relative advantage with the unbiased standard deviation.

    Args:
      rewards, group_ids: [B].
      rubric_scores: [B,R] verdict of each criterion; one prompt's responses share the criteria.
      relevance: [B,R,T] in [0, 1], of each token to each criterion.
      mask: [B,T].
      weight: of the token term.
      norm: "intra_sample" or "group".
      eps: added to both standard deviations.

    Returns:
      advantages [B,T].

    Raises:
      ValueError: unknown norm.

    Reference: arXiv 2604.02795. The released normaliser reshapes where it should transpose, which
    mixes responses; the transpose is written here.
    """
    check_option("norm", norm, NORMS)
    valid = jnp.broadcast_to(mask[:, None, :], relevance.shape)
    x = select(relevance, valid) * rubric_scores[..., None]

    def pooled(row_statistic, over_group):
        """A statistic of each row [B,R], brought to the pool of the norm, [B,R,1]."""
        if norm == "group":
            row_statistic = jax.vmap(over_group, in_axes=(1, None), out_axes=1)(
                row_statistic, group_ids
            )
        return row_statistic[..., None]

    def pool_sum(y):
        return pooled(masked_sum(y, valid, -1), groups.group_sum)

    n = jnp.maximum(pool_sum(jnp.ones_like(x)), 1)
    centred = x - pool_sum(x) / n
    std = jnp.sqrt(pool_sum(centred**2) / n)
    low = pooled(masked_min(x, valid, -1, empty=jnp.inf), groups.group_min)
    high = pooled(masked_max(x, valid, -1, empty=-jnp.inf), groups.group_max)
    normalised = jnp.where(high - low > 1e-6, centred / (std + eps), 0.0)
    advantages = groups.standardised(rewards, group_ids, eps=eps)
    return select(advantages[:, None] + weight * jnp.mean(normalised, axis=1), mask)
