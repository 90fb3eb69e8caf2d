"""CAPO: imitate first, discriminate later."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import masked_mean, select


@paper(
    "capo-curriculum",
    kind="credit",
    base="grpo",
    title="From Imitation to Discrimination: Toward A Generalized Curriculum Advantage Mechanism "
    "Enhancing Cross-Domain Reasoning Tasks",
    arxiv="2512.02580",
    year=2025,
)
def capo_credit(advantages, mask, *, switch=0.2, step=0, total_steps=1):
    """Only responses of non-negative advantage at first, all of them after the switch, [B,T].

        step < switch total_steps:   out_it = m_it A_it [mean_t A_it >= 0]
        else:                        out_it = m_it A_it

    The mean is over the row's valid tokens (an assumption for advantages that vary by token):
    a rejected row loses all its tokens, an accepted one keeps its negative ones. Rejected rows stay
    in every denominator of the loss and in its KL term.

    Args:
      advantages, mask: [B,T].
      switch: share of the training spent on imitation.
      step, total_steps: progress of the training, numbers or traced scalars.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2512.02580, equations 5, 9 and 10.
    """
    accepted = masked_mean(advantages, mask, axis=1, keepdims=True) >= 0
    imitating = step < switch * total_steps
    return select(jnp.where(accepted | jnp.logical_not(imitating), advantages, 0.0), mask)
