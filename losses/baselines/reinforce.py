"""REINFORCE: the plain score-function estimator."""

import jax

from losses.catalogue import paper
from losses.ops.masked import aggregate, masked_mean


@paper(
    "reinforce",
    kind="objective",
    title="Simple Statistical Gradient-Following Algorithms for Connectionist RL",
    year=1992,
    metric="surprisal",
)
def reinforce_loss(logprobs, advantages, mask, *, aggregation="sequence_sum", max_length=None):
    """The score-function estimator: no ratio, no clip, no critic.

        loss = - mean_i sum_t m_it A_it logprobs_it                  aggregation="sequence_sum"

    Valid for one update per rollout: the samples must come from the current policy. The value of
    the loss means nothing; watch reward, entropy and gradient norm.

    Args:
      logprobs: [B,T] log pi of the sampled tokens, nats.
      advantages: [B,T], constant.
      mask: [B,T].
      aggregation: "sequence_sum" (Williams), "token_mean", "sequence_mean" or "constant".
      max_length: generation limit in tokens, for "constant" only.

    Returns:
      (loss, metrics).

    Reference: Williams 1992.
    """
    weighted = advantages * logprobs
    loss = -aggregate(weighted, mask, aggregation, max_length)
    return loss, {"surprisal": -masked_mean(jax.lax.stop_gradient(logprobs), mask)}
