"""ORPO: likelihood of the chosen response plus a logistic penalty on the odds ratio."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from losses.catalogue import paper
from losses.ops.masked import lengths, masked_mean, masked_sum
from losses.ops.pairs import logistic_loss, margin_metrics, mean_over_pairs, side_metrics, sides

BOUND = -1e-6
"""Largest mean log-probability: at probability 1 the odds are infinite."""


@paper(
    "orpo",
    kind="objective",
    base="sft",
    title="ORPO: Monolithic Preference Optimization without Reference Model",
    arxiv="2403.07691",
    year=2024,
    metric="preference_margin",
)
def orpo_loss(logprobs, mask, chosen: Int[Array, "P"], rejected: Int[Array, "P"], *, lam=0.1):
    """Supervised loss on the chosen rows and log odds ratio against the rejected ones.

        a_i  = min( sum_t m_it logprobs_it / max(|y_i|, 1), -1e-6 )
        lo_i = a_i - log(1 - exp(a_i))
        nll  = - sum_p sum_t m logprobs of row chosen[p] / max( sum_p |y_chosen[p]|, 1 )
        loss = nll - lam mean_p log sigmoid( lo_chosen[p] - lo_rejected[p] )

    A row chosen in several pairs counts once per pair. Beyond the bound on a (a fully masked row,
    too) the odds have no gradient.

    Args:
      logprobs, mask: [B,T].
      chosen, rejected: [P] int, the rows of each pair's responses.
      lam: weight of the odds-ratio term.

    Returns:
      (loss, metrics); the logged log-probabilities are per token.

    Reference: Hong et al. 2024, arXiv 2403.07691. nll is over response tokens (TRL's includes the
    prompt).
    """
    mean = masked_mean(logprobs, mask, axis=-1)
    mean = jnp.where(mean > BOUND, BOUND, mean)
    better, worse = sides(mean - jnp.log(-jnp.expm1(mean)), chosen, rejected)
    margin = better - worse
    total, _ = sides(masked_sum(logprobs, mask, axis=-1), chosen, rejected)
    length, _ = sides(lengths(mask), chosen, rejected)
    nll = -jnp.sum(total) / jnp.maximum(jnp.sum(length), 1)
    metrics = {
        "nll": jax.lax.stop_gradient(nll),
        **margin_metrics(margin),
        **side_metrics(*sides(mean, chosen, rejected)),
    }
    return nll + lam * mean_over_pairs(logistic_loss(margin)), metrics
