"""AR and Lopti: keep unlikely tokens from dominating an update."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.options import check_option

STAGES = ("all", "low", "high")


@paper(
    "ar-lopti",
    kind="credit",
    base="grpo",
    title="Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs",
    arxiv="2505.12929",
    year=2025,
    stages={
        "objective": ("dual_clip_loss", {"clip_high": 0.24, "dual_clip": 10.0}),
        "regularizers": ("kl_penalty", {"kl_coef": 0.001}),
    },
)
def ar_lopti_credit(advantages, old_logprobs, mask, *, alpha=0.3, eta=0.5, stage="all"):
    """Advantages scaled by the token's probability, and split by it for two passes, [B,T].

        A'_it  = (alpha pi_it + 1 - alpha) A_it,     pi = exp(old_logprobs)
        stage "all": m A';   "low": m A' [pi < |eta|];   "high": m A' [pi >= |eta|]

    Lopti updates on stage "low" over the whole rollout batch, then on "high" over the same batch,
    both with the same old_logprobs; zeroed tokens stay in the loss's denominator.

    Args:
      advantages, old_logprobs, mask: [B,T].
      alpha: strength of the reweighting; 0 switches it off.
      eta: probability that parts the two stages; its sign only tells a trainer which comes first.
      stage: "all", "low" or "high".

    Returns:
      advantages [B,T], constant.

    Raises:
      ValueError: unknown stage.

    Reference: Yang et al. 2025, arXiv 2505.12929.
    """
    check_option("stage", stage, STAGES)
    probability = jnp.exp(old_logprobs)
    out = (alpha * probability + 1 - alpha) * advantages
    if stage != "all":
        low = probability < abs(eta)
        out = jnp.where(low if stage == "low" else ~low, out, 0.0)
    return select(out, mask)
