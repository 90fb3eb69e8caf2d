"""FSPO: the advantage of a checked sentence takes the sign of its verdict."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.masked import select


@paper(
    "fspo-factuality",
    kind="credit",
    base="grpo",
    title="The Hallucination Dilemma: Factuality-Aware Reinforcement Learning for Large Reasoning "
    "Models (FSPO)",
    arxiv="2505.24630",
    year=2025,
    stages={"objective": ("grpo_loss", {"beta": 0.001})},
)
def fspo_advantage(advantages, verdicts: Tokens, mask):
    """Flips the advantage where verdict and advantage disagree in sign, [B,T].

        out_it = m_it ( -A_it if verdicts_it A_it < 0 else A_it )

    A supported sentence is never pushed down, an unsupported one never up; where A = 0 nothing
    happens.

    Args:
      advantages, mask: [B,T].
      verdicts: [B,T] +1 on tokens of a supported sentence, -1 of an unsupported one, 0 where
        nothing was checked (the answer and tags included).

    Returns:
      advantages [B,T], constant.

    Reference: Li & Ng 2025, arXiv 2505.24630. The released code counts unchecked tokens as +1 and
    lays verdicts down from position 0 of the response; neither is reproduced.
    """
    against = select(verdicts, mask) * advantages < 0
    return select(jnp.where(against, -advantages, advantages), mask)
