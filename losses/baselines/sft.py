"""Supervised fine-tuning."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean


@paper(
    "sft",
    kind="objective",
    title="Supervised fine-tuning (token cross-entropy)",
    metric="perplexity",
)
def sft_loss(logprobs, mask):
    """Token cross-entropy of demonstrations.

        loss = - sum_it m_it logprobs_it / sum_it m_it

    Args:
      logprobs: [B,T] of the data's tokens.
      mask: [B,T] 1 on the response tokens to learn.

    Returns:
      (loss, metrics).
    """
    loss = -masked_mean(logprobs, mask)
    return loss, {"perplexity": jnp.exp(jnp.minimum(loss, 20.0))}
