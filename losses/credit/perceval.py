"""Perceval: tokens of spans that a verifier rejected get a lower advantage."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.masked import select


def span_mask(response_text, spans, offsets):
    """Tokens that overlap the first occurrence of a rejected span, [T] of 0 and 1.

    Args:
      response_text: the response.
      spans: substrings that the verifier rejected; one that is not found, or empty, is ignored.
      offsets: per token its (start, end) characters in the text, end exclusive.
    """
    found = [(response_text.find(span), len(span)) for span in spans if span]
    ranges = [(start, start + length) for start, length in found if start >= 0]
    return jnp.asarray(
        [float(any(max(a, start) < min(b, end) for start, end in ranges)) for a, b in offsets]
    )


@paper(
    "perceval",
    kind="credit",
    base="grpo",
    title="Improving Vision-language Models with Perception-centric Process Reward Models",
    year=2026,
    stages={"objective": ("grpo_loss", {"clip_high": 0.28, "beta": 0.01})},
)
def perceval_advantage(advantages, flagged: Tokens, mask, *, penalty=0.1):
    """Advantage lowered by a share of its size on rejected tokens.

        out_it = A_it - penalty flagged_it |A_it|

    A flagged token of a good response keeps (1 - penalty) A, one of a bad response is pushed down
    by (1 + penalty) A. Without an outcome signal (A = 0) flags do nothing.

    Args:
      advantages, mask: [B,T].
      flagged: [B,T] 1 on tokens inside a span that the verifier rejected (`span_mask`), else 0.
      penalty: share of |A|.

    Returns:
      advantages [B,T]; zeros on a fully masked row.

    Reference: RUCAIBox/Perceval, 2026.
    """
    return select(advantages - penalty * select(flagged, mask) * jnp.abs(advantages), mask)
