"""Divergences: estimators from sampled tokens, and sums over whole distributions."""

import jax
import jax.numpy as jnp

ESTIMATORS = ("k1", "k2", "k3", "abs")


def kl_estimate(d, estimator="k3"):
    """Estimate of KL(pi || ref) at a token sampled from pi, from d = log pi - log ref.

    k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d,  abs = |d|.

    Raises:
      ValueError: unknown estimator.
    """
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        return jnp.expm1(-d) + d
    if estimator == "abs":
        return jnp.sign(d) * d  # with gradient 0 at d = 0, where that of jnp.abs is 1
    raise ValueError(f"Unknown estimator {estimator!r}; one of {', '.join(ESTIMATORS)}.")


def log_softmax(logits, temperature=1.0):
    """Normalised log-probabilities of the tempered distribution, in float32 or better."""
    return jax.nn.log_softmax(logits / temperature, axis=-1)


def entropy_of(log_p):
    """Entropy of normalised log-probabilities over the last axis, nats; 0 log 0 = 0."""
    p = jnp.exp(log_p)
    return -jnp.sum(p * jnp.where(p > 0, log_p, 0.0), axis=-1)


def kl_terms(log_p, log_q):
    """p (log p - log q) of each entry, from log-probabilities; 0 log 0 = 0."""
    p = jnp.exp(log_p)
    return p * jnp.where(p > 0, log_p - log_q, 0.0)


def kl(log_p, log_q):
    """KL(p || q) over the last axis from normalised log-probabilities; 0 log 0 = 0."""
    return jnp.sum(kl_terms(log_p, log_q), axis=-1)


def jensen_shannon_terms(log_p, log_q, weight=0.5):
    """The summands of `jensen_shannon`, one per entry."""
    log_m = jnp.logaddexp(log_p + jnp.log(weight), log_q + jnp.log1p(-weight))
    return weight * kl_terms(log_p, log_m) + (1 - weight) * kl_terms(log_q, log_m)


def jensen_shannon(log_p, log_q, weight=0.5):
    """Generalised JSD: weight KL(p || m) + (1 - weight) KL(q || m), m = weight p + (1 - weight) q.

    Over the last axis, from normalised log-probabilities; 0 < weight < 1.
    """
    return jnp.sum(jensen_shannon_terms(log_p, log_q, weight), axis=-1)


def of_token(log_p, tokens):
    """Log-probability of the given tokens: [...,V] and integer [...] -> [...].

    An id outside the vocabulary, such as a padding of -1, reads the nearest entry.
    """
    at = jnp.clip(tokens, 0, log_p.shape[-1] - 1)[..., None]
    return jnp.take_along_axis(log_p, at, axis=-1)[..., 0]
