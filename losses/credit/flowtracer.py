"""FlowTracer: tokens that carry the flow of attention from question to answer count more."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.order import share, top


@paper(
    "flowtracer",
    kind="credit",
    base="grpo",
    title="How Does Reasoning Flow? Tracing Attention-Induced Information Flow for Targeted RL in "
    "LLMs (FlowTracer)",
    arxiv="2606.10646",
    year=2026,
)
def flowtracer_advantage(
    advantages,
    attention: Float[Array, "B S S"],
    question_mask: Float[Array, "B S"],
    answer_mask: Float[Array, "B S"],
    mask,
    *,
    top_ratio=0.4,
    gamma_flow=1.5,
):
    """Multiplies the advantage of the tokens with the largest flow, [B,T].

        High = of the row's ceil(top_ratio n) valid tokens of largest flow f, those with f > 0
        out  = m A ( gamma_flow where in High, else 1 )

    S = P + T positions: the prompt, then the response. See `attention_flow` for f. Ties go to the
    earlier token. A row without an answer or without a question keeps its advantage.

    Args:
      advantages, mask: [B,T].
      attention: [B,S,S]; [b,k,i] is the weight with which k attends to i, averaged over heads and
        middle layers, rows and columns of padding 0.
      question_mask, answer_mask: [B,S].
      top_ratio: share of the valid response tokens.
      gamma_flow: factor on them.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2606.10646, read second-hand; that answers absorb the flow and that High is
    taken per response are assumptions.
    """
    flow = attention_flow(attention, question_mask, answer_mask)[:, -mask.shape[1] :]
    # Flows that are equal by the graph (a chain passes on what it gets) must tie: the last bits go.
    bits = jnp.finfo(flow.dtype)
    ranked = jax.lax.reduce_precision(flow, bits.nexp, bits.nmant * 3 // 4)
    k = share(top_ratio, jnp.sum(mask > 0, axis=-1, keepdims=True))
    high = (top(ranked, mask, k) > 0) & (flow > 0)
    return select(advantages * jnp.where(high, gamma_flow, 1.0), mask)


def attention_flow(attention, question_mask, answer_mask):
    """Flow through each position when the question sends out one unit, [B,S].

        W_ik = attention[k,i] for i < k
        h_i  = 1 on answers, else sum_k W_ik h_k                     last position first
        W'_ik = W_ik h_k / h_i where i is no answer and h_i > 0      rows sum to 1
        f_k  = [question and h_k > 0] / |question| + sum_i f_i W'_ik

    Both recursions are unit-triangular systems; no term is negative, so zeros stay exact.

    Args:
      attention: [B,S,S].
      question_mask, answer_mask: [B,S].
    """
    answer = answer_mask > 0
    forward = jnp.triu(jnp.swapaxes(attention, -1, -2), k=1)  # W, from i to k
    forward = jnp.where(answer[..., None], 0.0, forward)
    h = _solve(forward, answer.astype(attention.dtype), lower=False)
    reached = h > 0
    shares = forward * h[:, None, :] / jnp.where(reached, h, 1.0)[..., None]
    shares = jnp.where(reached[..., None], shares, 0.0)
    asked = (question_mask > 0).astype(attention.dtype)
    source = asked * reached / jnp.maximum(jnp.sum(asked, axis=-1, keepdims=True), 1)
    return _solve(jnp.swapaxes(shares, -1, -2), source, lower=True)


def _solve(strict, source, lower):
    """x = strict x + source for a strictly triangular matrix, [B,S,S], [B,S] -> [B,S]."""
    return jax.lax.linalg.triangular_solve(
        -strict, source[..., None], left_side=True, lower=lower, unit_diagonal=True
    )[..., 0]
