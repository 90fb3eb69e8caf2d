"""KL-Cov: the tokens of highest covariance are held near the old policy."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.credit.clip_cov import token_covariance
from losses.ops.divergences import kl_estimate
from losses.ops.masked import count, masked_mean
from losses.ops.order import share_down, top
from losses.ops.ratios import WIDE_BOUND, log_ratio, token_ratio
from losses.ops.surrogates import ratio_metrics


@paper(
    "kl-cov",
    kind="objective",
    base="grpo",
    title="The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (KL-Cov)",
    arxiv="2505.22617",
    year=2025,
    metric="kl_penalty",
)
def kl_cov_loss(logprobs, old_logprobs, advantages, mask, *, ratio_cov=2e-3, kl_coef=1.0):
    """The unclipped importance-weighted policy gradient, with a KL term on a few tokens.

        c_it = (A_it - mean A)(logprobs_it - mean logprobs)         constant; means over the batch
        S    = the k valid tokens of largest c,  k = max(floor(ratio_cov N), 1)
        loss = sum m ( -A r + kl_coef [in S] |logprobs - old_logprobs| ) / N,   r = exp(...)

    No clip. At logprobs = old_logprobs the penalty has no gradient: with one on-policy update per
    rollout the method is inert. Ties in c: the earlier position in row-major order. In r the
    log-ratio is held only where exp would overflow float32.

    Args:
      logprobs, old_logprobs, advantages, mask: [B,T].
      ratio_cov: share of the N valid tokens that get the penalty.
      kl_coef: weight of the penalty.

    Returns:
      (loss, metrics).

    Reference: Cui et al. 2025, arXiv 2505.22617. The paper writes the penalty as a KL divergence;
    the authors' code uses the absolute log-ratio, as here.
    """
    covariance = token_covariance(logprobs, advantages, mask)
    chosen = top(covariance, mask, jnp.maximum(share_down(ratio_cov, count(mask)), 1), axis=None)
    penalty = chosen * kl_estimate(log_ratio(logprobs, old_logprobs, mask), "abs")
    ratio = token_ratio(logprobs, old_logprobs, mask, WIDE_BOUND)
    metrics = {
        "kl_penalty": masked_mean(jax.lax.stop_gradient(penalty), chosen),
        "penalised_fraction": masked_mean(chosen, mask),
        "covariance_mean": masked_mean(covariance, mask),
        **ratio_metrics(logprobs, old_logprobs, mask),
    }
    return masked_mean(kl_coef * penalty - advantages * ratio, mask), metrics
