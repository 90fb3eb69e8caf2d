"""TRUST-SQL: a second GRPO track that credits exploration up to the proposed schema."""

import jax
import jax.numpy as jnp

from losses.arrays import Rows, Tokens
from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import aggregate, rows_to_tokens
from losses.ops.ratios import WIDE_BOUND, token_ratio
from losses.ops.surrogates import clip_metrics, clipped_surrogate, ratio_metrics


@paper(
    "trust-sql",
    kind="objective",
    base="grpo",
    title="TRUST-SQL: Tool-Integrated Multi-Turn Reinforcement Learning for Text-to-SQL over "
    "Unknown Schemas",
    arxiv="2603.16448",
    year=2026,
    metric="schema_loss",
)
def dual_track_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    group_ids,
    schema_mask: Tokens,
    schema_rewards: Rows,
    valid: Rows,
    *,
    schema_weight=0.5,
    answer_weight=1.0,
    clip_low=0.2,
    clip_high=0.28,
    eps=1e-6,
    adv_clip=10.0,
):
    """GRPO on the answer over all tokens, plus GRPO on the schema over the tokens up to it.

        A(x)_i = clip( (x_i - mean x) / (std x + eps), -adv_clip, adv_clip ) valid_i
        l(A)   = max( -r A, -clip(r, 1 - clip_low, 1 + clip_high) A )
        loss   = answer_weight seqmean(l(A(rewards)), mask)
               + schema_weight seqmean(l(A(schema_rewards)), mask schema_mask)

    Means and population deviations are over the group's valid rows, A = 0 where these are fewer
    than two or agree. seqmean averages each row over its own tokens of the track, then over all B
    rows: rows without a proposal count as 0.

    Args:
      logprobs, old_logprobs, mask: [B,T].
      rewards, schema_rewards, group_ids: [B].
      schema_mask: [B,T] 1 up to the end of the proposing turn; 0 everywhere if there was none.
      valid: [B] 0 for rollouts that the environment cut off.
      schema_weight, answer_weight: of the tracks.
      clip_low, clip_high: window of the ratio.
      eps: added to the standard deviation.
      adv_clip: bound on |A|.

    Returns:
      (loss, metrics).

    Reference: arXiv 2603.16448, from a reader's copy of its training code.
    """
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)

    def track(x, track_mask):
        a = groups.standardised(x, group_ids, eps=eps, ddof=0, valid=valid)
        a = rows_to_tokens(jnp.clip(a, -adv_clip, adv_clip) * valid, track_mask)
        term = clipped_surrogate(ratio, a, clip_low, clip_high)
        return -aggregate(term, track_mask, "sequence_mean"), a

    answer, advantages = track(rewards, mask)
    schema, _ = track(schema_rewards, mask * (schema_mask > 0))
    metrics = {
        "answer_loss": jax.lax.stop_gradient(answer),
        "schema_loss": jax.lax.stop_gradient(schema),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **clip_metrics(ratio, advantages, mask, clip_low, clip_high),
    }
    return answer_weight * answer + schema_weight * schema, metrics
