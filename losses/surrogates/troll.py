"""TROLL: a differentiable projection onto a KL ball in place of the clip."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.divergences import kl, log_softmax, of_token
from losses.ops.masked import masked_mean, select
from losses.ops.ratios import WIDE_BOUND, bounded_exp

LOG_FLOOR = -1e4
"""Smallest log-probability told apart from 0, so that one-hot policies keep a finite path."""

VAR_FLOOR = 1e-12


def _path(log_p, log_q, beta):
    """log p_beta = log_softmax((1 - beta) log q + beta log p), from q at 0 to p at 1."""
    return jax.nn.log_softmax((1 - beta) * log_q + beta * log_p, axis=-1)


@jax.jit  # so that an eager call compiles the loop once
def _solve(log_p, log_q, bound):
    """Largest beta in [0, 1) found by bisection with KL(p_beta || q) <= bound, [...,1]."""
    halvings = jnp.finfo(log_p.dtype).nmant + 8

    def halve(_, bracket):
        low, high = bracket
        beta = (low + high) / 2
        inside = kl(_path(log_p, log_q, beta), log_q)[..., None] <= bound
        return jnp.where(inside, beta, low), jnp.where(inside, high, beta)

    zeros = jnp.zeros_like(log_p[..., :1])
    return jax.lax.fori_loop(0, halvings, halve, (zeros, zeros + 1))[0]


@jax.custom_jvp
def projection_weight(log_p, log_q, bound):
    """beta in (0, 1] of the projection of p onto {p' : KL(p' || q) <= bound}, [...,1].

    1 where p lies inside. The projection in KL(. || p) is p_beta on the geometric path from q to p,
    with KL(p_beta || q) = bound. The derivative is that of the implicit equation, not of the
    bisection: d beta = - dKL at fixed beta / (beta Var_{p_beta}(log p - log q)). q and the bound
    are constants.

    Args:
      log_p, log_q: [...,V] normalised log-probabilities.
      bound: nats.
    """
    outside = kl(log_p, log_q)[..., None] > bound
    return jnp.where(outside, _solve(log_p, log_q, bound), 1.0)


@projection_weight.defjvp
def _projection_weight_jvp(primals, tangents):
    log_p, log_q, bound = primals
    beta = projection_weight(log_p, log_q, bound)
    at = _path(log_p, log_q, beta)
    p = jnp.exp(at)
    u = jnp.where(p > 0, log_p - log_q, 0.0)
    centred = u - jnp.sum(p * u, axis=-1, keepdims=True)
    # With d/du of KL(p_beta || q) at fixed beta: beta^2 p (u - mean u).
    change = jnp.sum(beta**2 * p * centred * tangents[0], axis=-1, keepdims=True)
    slope = jnp.maximum(beta * jnp.sum(p * centred**2, axis=-1, keepdims=True), VAR_FLOOR)
    return beta, jnp.where(beta < 1, -change / slope, 0.0)


def troll_tokens(logits, old_logits, tokens, *, kl_bound=0.05):
    """Projected ratio, distance to the projection, drift and whether one was needed, each [...].

    From logits [...,V] and sampled tokens [...].
    """
    bound = jnp.inf if kl_bound is None else kl_bound
    log_p = jnp.maximum(log_softmax(logits), LOG_FLOOR)
    log_q = jnp.maximum(jax.lax.stop_gradient(log_softmax(old_logits)), LOG_FLOOR)
    beta = projection_weight(log_p, log_q, jnp.asarray(bound, log_p.dtype))
    outside = beta[..., 0] < 1
    # Inside, the path at 1 is p itself; taken as it is, it costs no rounding.
    projected = jnp.where(outside[..., None], _path(log_p, log_q, beta), log_p)
    log_ratio = of_token(projected, tokens) - of_token(log_q, tokens)
    distance = jnp.where(outside, kl(log_p, jax.lax.stop_gradient(projected)), 0.0)
    return {
        "projected_ratio": bounded_exp(log_ratio, WIDE_BOUND),
        "projection_kl": distance,
        "policy_kl": jax.lax.stop_gradient(kl(log_p, log_q)),
        "projected": outside.astype(log_p.dtype),
    }


def troll_mean(
    projected_ratio, projection_kl, policy_kl, projected, mask, advantages, *, alpha=1.0
):
    """Token mean of the surrogate and the regression onto the projection."""
    term = alpha * select(projection_kl, mask) - advantages * select(projected_ratio, mask, 1.0)
    metrics = {
        "projected_fraction": masked_mean(projected, mask),
        "kl": masked_mean(policy_kl, mask),
        "projection_kl": masked_mean(projection_kl, mask),
    }
    return masked_mean(term, mask), metrics


@paper(
    "troll",
    kind="objective",
    base="grpo",
    title="TROLL: Trust Regions Improve Reinforcement Learning for Large Language Models",
    arxiv="2510.03817",
    year=2025,
    split=(troll_tokens, troll_mean),
    metric="projected_fraction",
)
def troll_loss(logits, old_logits, tokens, mask, advantages, *, kl_bound=0.05, alpha=1.0):
    """The surrogate at the policy's projection onto a KL ball around the old policy, no clip.

        p_beta = softmax( log q + beta (log p - log q) ),   p the policy, q the old one
        beta   = 1 if KL(p || q) <= kl_bound, else the root of KL(p_beta || q) = kl_bound
        r      = p_beta(token) / q(token)
        loss   = sum m ( -A r + alpha KL(p || stop_grad p_beta) ) / sum m

    p_beta is the nearest distribution to p, in KL(. || p), within the bound. The gradient flows
    through beta by the implicit function theorem, not through the search for it; both signs of A
    are projected alike. Over the whole vocabulary, not the paper's top-64 form. Log-probabilities
    are floored at -1e4.

    Args:
      logits, old_logits: [B,T,V].
      tokens: [B,T] int.
      mask, advantages: [B,T].
      kl_bound: radius of the ball, nats per token; None or inf: no projection.
      alpha: weight of the regression onto the projection.

    Returns:
      (loss, metrics).

    Reference: arXiv 2510.03817; a public re-implementation (which detaches the multiplier). The
    token mean is assumed.
    """
    statistics = troll_tokens(logits, old_logits, tokens, kl_bound=kl_bound)
    return troll_mean(mask=mask, advantages=advantages, alpha=alpha, **statistics)
