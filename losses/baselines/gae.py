"""Generalised advantage estimation."""

from losses.catalogue import paper
from losses.ops.masked import whiten as whitened
from losses.ops.returns import generalised_advantages


@paper(
    "gae",
    kind="advantage",
    base="ppo",
    title="High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    arxiv="1506.02438",
    year=2015,
)
def gae(token_rewards, values, mask, *, gamma=1.0, lam=0.95, whiten=False):
    """Per-token advantages from dense rewards and a value head, [B,T].

        delta_t = r_t + gamma V_{t+} - V_t,   A_t = delta_t + gamma lam A_{t+}

    t+ is the row's next valid position; V and A are 0 beyond the last one. Masked positions are
    skipped as if they were not there and get 0 (verl leaves the neighbour's advantage there). With
    `whiten`, A <- (A - mean) / sqrt(var + 1e-8) over the batch's valid tokens, var unbiased; a
    single valid token stays as it is. Value targets are the unwhitened A + V, formed by the caller.

    Args:
      token_rewards: [B,T].
      values: [B,T], those of the start of the update.
      mask: [B,T].
      gamma, lam: discount and trace decay, in [0, 1].
      whiten: standardise over the batch.

    Returns:
      advantages [B,T], constant.

    Reference: Schulman et al. 2015, arXiv 1506.02438.
    """
    advantages = generalised_advantages(token_rewards, values, mask, gamma, lam)
    if whiten:
        advantages = whitened(advantages, mask, ddof=1, eps=1e-8)
    return advantages
