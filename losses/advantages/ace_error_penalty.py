"""ACE: wrong answers that the policy has come to believe in are punished harder."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.options import check_option
from losses.ops.ratios import sequence_log_ratio


@paper(
    "ace-error-penalty",
    kind="credit",
    base="grpo",
    title="Overconfident Errors Need Stronger Correction: Asymmetric Confidence Penalties for "
    "Reinforcement Learning",
    arxiv="2602.21420",
    year=2026,
)
def ace_credit(advantages, logprobs, ref_logprobs, mask, *, alpha=1.0, normalize="sum", c_max=None):
    """Negative advantages times a softplus of the response's gain in confidence, [B,T].

        c_i    = sum_t m_it (logprobs_it - ref_logprobs_it)        "mean": divided by |y_i|
        f_i    = 1 + alpha log(1 + exp(min(c_i, c_max)))
        out_it = m_it A_it if A_it >= 0 else m_it A_it f_i

    Args:
      advantages, logprobs, ref_logprobs, mask: [B,T]; logprobs at the start of the update.
      alpha: strength; 0 is the identity.
      normalize: "sum" (as written) or "mean" over the response's tokens.
      c_max: cap of c, nats; None: none. An addition of ours, since a sum grows with length.

    Returns:
      advantages [B,T], constant.

    Raises:
      ValueError: unknown normalize.

    Reference: arXiv 2602.21420, at second hand; the form 1 + alpha softplus(c) and alpha = 1 are
    assumed.
    """
    check_option("normalize", normalize, ("sum", "mean"))
    c = sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=normalize == "mean")
    if c_max is not None:
        c = jnp.minimum(c, c_max)
    factor = 1 + alpha * jax.nn.softplus(c)[:, None]
    return select(jnp.where(advantages >= 0, advantages, advantages * factor), mask)
