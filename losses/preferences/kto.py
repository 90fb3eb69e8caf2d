"""KTO: single responses marked good or bad, around a reference point."""

import jax
import jax.numpy as jnp

from losses.arrays import Rows
from losses.catalogue import paper
from losses.ops.masked import masked_mean
from losses.ops.ratios import sequence_log_ratio


@paper(
    "kto",
    kind="objective",
    title="KTO: Model Alignment as Prospect Theoretic Optimization",
    arxiv="2402.01306",
    year=2024,
    metric="reference_point",
)
def kto_loss(
    logprobs,
    ref_logprobs,
    mask,
    desirable: Rows,
    kl_log_ratios: Rows,
    *,
    beta=0.1,
    desirable_weight=1.0,
    undesirable_weight=1.0,
):
    """A saturating value of the implicit reward above or below the batch's KL to the reference.

        h_i  = sum_t m_it (logprobs_it - ref_logprobs_it),   z = max( mean(kl_log_ratios), 0 )
        good: l_i = desirable_weight   ( 1 - sigmoid( beta (h_i - z) ) )
        bad:  l_i = undesirable_weight ( 1 - sigmoid( beta (z - h_i) ) )
        loss = mean_i l_i

    The mean is over all rows together, z over all entries. A fully masked row has h = 0 and stays
    in the count.

    Args:
      logprobs, ref_logprobs, mask: [B,T].
      desirable: [B] 1 good, 0 bad.
      kl_log_ratios: [B] summed log pi - log pi_ref of a response that belongs to another prompt of
        the batch, constant.
      beta: inverse temperature.
      desirable_weight, undesirable_weight: of the two kinds.

    Returns:
      (loss, metrics).

    Reference: Ethayarajh et al. 2024, arXiv 2402.01306; HALOs.
    """
    h = sequence_log_ratio(logprobs, ref_logprobs, mask, normalise=False)
    point = jnp.maximum(jnp.mean(kl_log_ratios), 0)
    good = desirable > 0
    gain = beta * jnp.where(good, h - point, point - h)
    weight = jnp.where(good, desirable_weight, undesirable_weight)
    reward = jax.lax.stop_gradient(beta * h)
    metrics = {
        "reference_point": point,
        "desirable_reward": masked_mean(reward, good.astype(mask.dtype)),
        "undesirable_reward": masked_mean(reward, (~good).astype(mask.dtype)),
    }
    return jnp.mean(weight * jax.nn.sigmoid(-gain)), metrics
