"""DHPO: each token's ratio mixed with its sequence's."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_max, masked_mean, masked_min
from losses.ops.options import check_option
from losses.ops.ratios import BOUND, bounded_exp, log_ratio
from losses.ops.surrogates import clip_ratio, clipped_side, clipped_surrogate, ratio_metrics


@paper(
    "dhpo",
    kind="objective",
    base="grpo",
    title="Orchestrating Tokens and Sequences: Dynamic Hybrid Policy Optimization for RLVR",
    arxiv="2601.05607",
    year=2026,
    gradients=("logprobs",),
    metric="clip_fraction",
)
def dhpo_loss(
    logprobs,
    old_logprobs,
    entropy,
    mask,
    advantages,
    *,
    mixing="average",
    alpha=0.5,
    clip_tok_low=0.2,
    clip_tok_high=0.28,
    clip_seq_low=3e-4,
    clip_seq_high=4e-4,
    combine="ratio",
    high_entropy_to="token",
):
    """A mix of GRPO's token ratio and GSPO's sequence ratio, each clipped in its own region.

        r_bt = exp(d_bt),  s_b = exp( sum_t m d / |m_b| ),  d = clip(logprobs - old_logprobs, +-20)
        r^c, s^c: both clipped to their windows
        w_bt = alpha                                              mixing="average"
             = (H_bt - min_row H) / (max_row H - min_row H)       mixing="entropy", 0.5 if all equal
        combine="ratio":  x = min( (w r + (1-w) s) A, (w r^c + (1-w) s^c) A )
        combine="loss":   x = w min(r A, r^c A) + (1-w) min(s A, s^c A)
        loss = - mean_b (1/|m_b|) sum_t m x

    s carries its gradient to every token of the row; w is constant. A token may lose the clipped
    branch's gradient and keep the other's.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      entropy: [B,T] of the policy, nats; constant, read under mixing="entropy".
      mixing: "average" or "entropy".
      alpha: weight of the token ratio under "average".
      clip_tok_low, clip_tok_high, clip_seq_low, clip_seq_high: the two windows; None: no bound.
      combine: "ratio" (mix, then compare) or "loss" (compare, then mix).
      high_entropy_to: "token", or "sequence" for 1 - w under mixing="entropy".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: an unknown option.

    Reference: arXiv 2601.05607, equations 8 to 11 at second hand. That the mixed ratios are
    compared (combine="ratio"), that high entropy leans to the token, and the windows are assumed.
    """
    check_option("mixing", mixing, ("average", "entropy"))
    check_option("combine", combine, ("ratio", "loss"))
    check_option("high_entropy_to", high_entropy_to, ("token", "sequence"))
    d = log_ratio(logprobs, old_logprobs, mask).clip(-BOUND, BOUND)
    r = bounded_exp(d)
    s = jnp.broadcast_to(bounded_exp(masked_mean(d, mask, -1, keepdims=True)), mask.shape)
    if mixing == "average":
        w = jnp.full_like(r, alpha)
    else:
        low, high = (f(entropy, mask, -1, keepdims=True) for f in (masked_min, masked_max))
        flat = high <= low
        w = jnp.where(flat, 0.5, (entropy - low) / jnp.where(flat, 1.0, high - low))
        w = 1 - w if high_entropy_to == "sequence" else w
    token, sequence = (clip_tok_low, clip_tok_high), (clip_seq_low, clip_seq_high)
    if combine == "ratio":
        mixed = w * r + (1 - w) * s
        clipped = w * clip_ratio(r, *token) + (1 - w) * clip_ratio(s, *sequence)
        held = clipped * advantages < mixed * advantages
        term = jnp.where(held, clipped, mixed) * advantages
    else:
        term = w * clipped_surrogate(r, advantages, *token)
        term = term + (1 - w) * clipped_surrogate(s, advantages, *sequence)
    sides = {
        "clip_fraction": clipped_side(r, advantages, *token),
        "sequence_clip_fraction": clipped_side(s, advantages, *sequence),
    }
    metrics = {
        "weight_mean": masked_mean(w, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
        **{name: masked_mean(side.astype(mask.dtype), mask) for name, side in sides.items()},
    }
    return -aggregate(term, mask, "sequence_mean"), metrics
