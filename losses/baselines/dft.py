"""Dynamic fine-tuning: cross-entropy with the reward rectified."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean


@paper(
    "dft",
    kind="objective",
    base="sft",
    title="On the Generalization of SFT: A Reinforcement Learning Perspective with Reward "
    "Rectification (DFT)",
    arxiv="2508.05629",
    year=2025,
    metric="weight_mean",
)
def dft_loss(logprobs, mask):
    """Cross-entropy of each token weighted by its own probability, a constant.

        loss = - sum_it m_it stop_grad( exp(logprobs_it) ) logprobs_it / sum_it m_it

    As a policy gradient, cross-entropy has the implicit reward 1 / pi; the weight turns it into 1.
    The denominator counts tokens, not weights.

    Args:
      logprobs: [B,T] of the data's tokens.
      mask: [B,T] 1 on the response tokens to learn.

    Returns:
      (loss, metrics).

    Reference: Wu et al. 2025, arXiv 2508.05629.
    """
    weight = jnp.exp(jax.lax.stop_gradient(logprobs))
    loss = -masked_mean(weight * logprobs, mask)
    surprisal = -masked_mean(jax.lax.stop_gradient(logprobs), mask)
    metrics = {
        "weight_mean": masked_mean(weight, mask),
        "perplexity": jnp.exp(jnp.minimum(surprisal, 20.0)),
    }
    return loss, metrics
