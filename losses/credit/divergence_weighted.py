"""Advantages scaled by how far each token's distribution has moved, and tools to map the moves."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.divergences import jensen_shannon, kl_estimate, log_softmax
from losses.ops.masked import select
from losses.ops.ratios import WIDE_BOUND, log_ratio


@paper(
    "divergence-weighted",
    kind="credit",
    base="dapo",
    title="Sparse but Critical: A Token-Level Analysis of Distributional Shifts in RLVR "
    "Fine-Tuning of LLMs",
    year=2026,
)
def divergence_weighted_advantage(
    logprobs, old_logprobs, advantages, mask, *, scale=1.0, alpha=10.0
):
    """Weights each token by a sigmoid of its own divergence since the rollout, [B,T].

        kl_it = r_it - 1 - log r_it,   r = exp(logprobs - old_logprobs)     k3 of KL(old || current)
        w_it  = 1 + scale ( sigmoid(alpha kl_it) - 1/2 )
        out   = m A w

    Constant: recompute it before each minibatch's loss from the current log-probabilities. The
    log-ratio is held only where exp would overflow float32.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      scale: width of the weight.
      alpha: positive boosts tokens that moved ("high-KL"), negative those that did not.

    Returns:
      advantages [B,T], constant.

    Reference: 2026, read second-hand: the form is the paper's, scale and alpha are assumptions.
    """
    d = jnp.clip(log_ratio(logprobs, old_logprobs, mask), -WIDE_BOUND, WIDE_BOUND)
    moved = kl_estimate(-d, "k3")
    weight = 1 + scale * (jax.nn.sigmoid(alpha * moved) - 0.5)
    return select(advantages * weight, mask)


def token_js(base_logits, rl_logits, mask):
    """Jensen-Shannon divergence of two models at each position, nats, in [0, log 2], [B,T].

    Args:
      base_logits, rl_logits: [B,T,V].
      mask: [B,T].
    """
    valid = (jnp.asarray(mask) > 0)[..., None]
    base, rl = (log_softmax(jnp.where(valid, x, 0.0)) for x in (base_logits, rl_logits))
    return jnp.maximum(jensen_shannon(base, rl), 0.0)


def cross_sample_step(
    primary_logits, intervention_logits, swaps, keys, *, threshold=0.1, budget=None
):
    """One step of sampling from a primary model that another corrects where they disagree.

    A row samples from the intervention where JS(primary, intervention) exceeds `threshold` and
    fewer than `budget` swaps were effective, else from the primary. Both models draw with the same
    random number (Gumbel noise); a swap is effective, and counted, only if it changes the token.

    Args:
      primary_logits, intervention_logits: [B,V] at the rows' shared prefixes.
      swaps: [B] int effective swaps so far.
      keys: [B] jax random keys of this step.
      threshold: nats; at least log 2: never swap; negative: always.
      budget: None: unlimited.

    Returns:
      (tokens [B], swaps [B] after the step).
    """
    noise = jax.vmap(lambda key, row: jax.random.gumbel(key, row.shape))(keys, primary_logits)
    own = jnp.argmax(jax.nn.log_softmax(primary_logits) + noise, axis=-1)
    other = jnp.argmax(jax.nn.log_softmax(intervention_logits) + noise, axis=-1)
    apart = token_js(primary_logits, intervention_logits, jnp.ones(primary_logits.shape[:1]))
    swap = apart > threshold
    if budget is not None:
        swap = swap & (swaps < budget)
    tokens = jnp.where(swap, other, own)
    return tokens, swaps + (tokens != own)
