"""VERL: a bonus from the effective rank of hidden states, its growth and its acceleration."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops.masked import masked_mean, select


def effective_rank(hidden, mask=None):
    """Effective rank of the centred hidden states of one response, a scalar.

        ER = exp( - sum q log(q + 1e-8) ),   q = s / (sum s + 1e-8),   s the singular values

    Args:
      hidden: [T,D].
      mask: [T], the tokens that count; None: all. Fewer than two: 0.
    """
    mask = jnp.ones(hidden.shape[0], hidden.dtype) if mask is None else mask
    z = select(hidden, mask[:, None])
    z = select(z - masked_mean(z, jnp.broadcast_to(mask[:, None], z.shape), 0), mask[:, None])
    s = jnp.linalg.svd(z, compute_uv=False)
    q = s / (jnp.sum(s) + 1e-8)
    rank = jnp.exp(-jnp.sum(q * jnp.log(q + 1e-8)))
    return jnp.where(jnp.sum(mask > 0) >= 2, rank, 0.0)


def rank_dynamics(hidden, stride, mask=None):
    """Velocity and acceleration (ERV, ERA) of the effective rank along one response.

        e_j = ER of the first j stride + 1 tokens,  j stride < n
        v_j = e_j - mean(e_1 .. e_{j-1}),   ERV = mean v;    c_j = v_j - v_{j-1},   ERA = mean c

    Args:
      hidden: [T,D].
      stride: tokens between two ranks, static.
      mask: [T], the tokens that count; None: all.
    """
    length = hidden.shape[0]
    mask = jnp.ones(length, hidden.dtype) if mask is None else mask
    at = jnp.arange(stride, length, stride)
    if not at.size:
        return jnp.zeros((), hidden.dtype), jnp.zeros((), hidden.dtype)
    index = jnp.cumsum(mask > 0) - 1
    e = jax.lax.map(lambda t: effective_rank(hidden, mask * (index <= t)), at)
    there = (at < jnp.sum(mask > 0)).astype(e.dtype)
    earlier = jnp.cumsum(e * there) - e * there
    j = jnp.arange(at.size)
    v = e - earlier / jnp.maximum(j, 1)
    c = v - jnp.roll(v, 1)
    return masked_mean(v, there * (j >= 1)), masked_mean(c, there * (j >= 2))


def rank_metrics(hidden, mask, *, stride=40):
    """(ERA, ERV, ER) of each response's last-layer hidden states, [B,T,D] -> [B,3]."""

    def one(row):
        z, m = row
        erv, era = rank_dynamics(z, stride, m)
        return jnp.stack([era, erv, effective_rank(z, m)])

    return jax.lax.map(one, (hidden, mask))


@paper(
    "verl-rank",
    kind="credit",
    base="grpo",
    title="Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM "
    "Reasoning in RLVR (VERL)",
    arxiv="2509.23808",
    year=2025,
)
def verl_rank_advantage(
    advantages,
    rank_metrics: Float[Array, "B 3"],
    baselines: Float[Array, "3"],
    mask,
    *,
    gain=2.0,
    kappa=2.0,
    scale=1.0,
):
    """Advantage plus a one-sided bonus for rank (explore) or its growth (exploit) above baseline.

        dev  = clip( (metric - base) / (|base| + 1e-8), -5, 5 ),  beta = sigmoid(gain dev_ERA)
        phi  = scale ( beta tanh(dev_ER) + (1 - beta) tanh(dev_ERV) )
        out  = A + min( max(phi, 0), |A| / kappa )

    So the sign of A never flips for kappa >= 1, and A = 0 gets no bonus.

    Args:
      advantages, mask: [B,T].
      rank_metrics: [B,3] (ERA, ERV, ER) of each response, see the function of that name.
      baselines: [3] running means of the same three: base <- 0.7 base + 0.3 batch mean, from 0;
        no bonus on the first step.
      gain: steepness of the choice by acceleration.
      kappa: the bonus is at most |A| / kappa.
      scale: of the bonus.

    Returns:
      advantages [B,T].

    Reference: arXiv 2509.23808. The released code raises the advantage of the last valid token
    only; the description shapes the response's advantage, so every valid token gets the bonus.
    """
    deviation = (rank_metrics - baselines) / (jnp.abs(baselines) + 1e-8)
    era, erv, er = jnp.clip(deviation, -5.0, 5.0).T
    beta = jax.nn.sigmoid(gain * era)
    phi = scale * (beta * jnp.tanh(er) + (1 - beta) * jnp.tanh(erv))
    bonus = jnp.minimum(jnp.maximum(phi, 0.0)[:, None], jnp.abs(advantages) / kappa)
    return select(advantages + bonus, mask)
