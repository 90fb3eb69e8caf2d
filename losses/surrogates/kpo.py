"""KPO: token log-ratios smoothed by a causal Kalman filter."""

import jax

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.ratios import capped_exp, kalman_filtered, log_ratio
from losses.surrogates.gspo import LOG_CAP, sequence_surrogate


@paper(
    "kpo",
    kind="objective",
    base="grpo",
    title="Online Causal Kalman Filtering for Stable and Effective Policy Optimization",
    arxiv="2602.10609",
    year=2026,
    metric="clip_fraction",
)
def kpo_loss(
    logprobs,
    old_logprobs,
    mask,
    advantages,
    *,
    process_noise=1e-6,
    measurement_noise=1.0,
    initial_variance=0.0,
    clip_low=3e-4,
    clip_high=4e-4,
):
    """GRPO's clipped loss on a filtered ratio.

        z_it = stop_grad(logprobs_it - old_logprobs_it) m_it
        x_it = (1 - K_t) x_i,t-1 + K_t z_it                 Kalman gains of a random walk, x_i0 = 0
        r_it = exp( min( logprobs_it - stop_grad(logprobs_it) + x_it m_it, 10 ) )
        loss = - mean_i (1/|y_i|) sum_t m min( r A, clip(r, 1 - clip_low, 1 + clip_high) A )

    The filter is outside the gradient: d r / d logprobs = r. Gains depend on neither row nor data;
    they and the filter run as associative scans. Positions are counted through masked ones, which
    observe 0. With the defaults the steady gain is 1e-3: on responses of tens of tokens use a
    process noise of 1e-2 to 1e-1.

    Args:
      logprobs, old_logprobs, mask, advantages: [B,T].
      process_noise, measurement_noise, initial_variance: Q, R, P_0 of the filter, nats^2.
      clip_low, clip_high: window of the filtered ratio; None: no bound.

    Returns:
      (loss, metrics).

    Reference: arXiv 2602.10609; defaults of the authors' published script.
    """
    z = jax.lax.stop_gradient(log_ratio(logprobs, old_logprobs, mask))
    x = select(kalman_filtered(z, process_noise, measurement_noise, initial_variance), mask)
    own = logprobs
    ratio = capped_exp(own - jax.lax.stop_gradient(own) + x, LOG_CAP)
    loss, metrics = sequence_surrogate(
        ratio, logprobs, old_logprobs, advantages, mask, clip_low, clip_high
    )
    return loss, metrics
