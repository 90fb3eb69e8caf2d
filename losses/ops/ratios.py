"""Importance ratios in log space: token, sequence, prefix, smallest of the prefix, filtered.

Masked positions are transparent: they contribute a log-ratio of 0 and carry no gradient.
"""

import jax
import jax.numpy as jnp

from losses.ops.masked import masked_mean, masked_sum, select

BOUND = 20.0
"""Log-ratios are clamped to [-BOUND, BOUND] before an exponential; beyond, the gradient is 0."""

WIDE_BOUND = 80.0
"""The same where a paper names no clamp: only what would overflow float32 is held."""


def log_ratio(logprobs, old_logprobs, mask):
    """log pi - log pi_old of each token, 0 where masked, [B,T]."""
    return select(logprobs, mask) - select(old_logprobs, mask)


def bounded_exp(x, bound=BOUND):
    """exp(clip(x, -bound, bound)): finite everywhere, gradient 0 beyond the bound."""
    return jnp.exp(jnp.clip(x, -bound, bound))


def token_ratio(logprobs, old_logprobs, mask, bound=BOUND):
    """pi / pi_old of each token, 1 where masked, [B,T]."""
    return bounded_exp(log_ratio(logprobs, old_logprobs, mask), bound)


def sequence_log_ratio(logprobs, old_logprobs, mask, *, normalise=True):
    """Log-ratio of each whole response: the mean over its tokens (GSPO) or their sum, [B]."""
    reduce = masked_mean if normalise else masked_sum
    return reduce(log_ratio(logprobs, old_logprobs, mask), mask, axis=-1)


def capped_exp(x, cap):
    """exp(min(x, cap)): the one-sided guard of the sequence ratios, gradient 0 beyond."""
    return jnp.exp(jnp.minimum(x, cap))


def with_value_of(value, logprobs):
    """value, constant, carried by exp(logprobs - stop_grad(logprobs)): the gradient is value.

    value must broadcast to logprobs: [B,1] or [B,T].
    """
    carrier = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    return jax.lax.stop_gradient(value) * carrier


def prefix_log_ratio(logprobs, old_logprobs, mask, *, inclusive=True):
    """Sum of the log-ratios of the tokens up to t (or strictly before t), [B,T]."""
    d = log_ratio(logprobs, old_logprobs, mask)
    total = jnp.cumsum(d, axis=-1)
    return total if inclusive else total - d


def smallest_prefix_log_ratio(logprobs, old_logprobs, mask):
    """Smallest token log-ratio strictly before t, 0 where no valid token precedes, [B,T]."""
    d = select(log_ratio(logprobs, old_logprobs, mask), mask, jnp.inf)
    running = jax.lax.cummin(d, axis=1)
    before = jnp.concatenate([jnp.full_like(d[:, :1], jnp.inf), running[:, :-1]], axis=1)
    return jnp.where(jnp.isinf(before), 0.0, before)


def kalman_gains(length, process_noise, measurement_noise, initial_variance, dtype):
    """Gains K_1..K_T of the scalar random-walk Kalman filter, [T].

        P^-_t = P_{t-1} + Q,   K_t = P^-_t / (P^-_t + R),   P_t = R K_t

    P_t is a Moebius map of P_{t-1} with matrix [[R, R Q], [1, Q + R]]; products of the matrices,
    rescaled, give all P_t in logarithmic depth.
    """
    q, r = jnp.asarray(process_noise, dtype), jnp.asarray(measurement_noise, dtype)
    step = jnp.stack([jnp.stack([r, r * q]), jnp.stack([jnp.ones_like(q), q + r])])

    def compose(first, second):
        a, b = first, second
        product = jnp.stack(
            [
                b[..., 0, 0] * a[..., 0, 0] + b[..., 0, 1] * a[..., 1, 0],
                b[..., 0, 0] * a[..., 0, 1] + b[..., 0, 1] * a[..., 1, 1],
                b[..., 1, 0] * a[..., 0, 0] + b[..., 1, 1] * a[..., 1, 0],
                b[..., 1, 0] * a[..., 0, 1] + b[..., 1, 1] * a[..., 1, 1],
            ],
            axis=-1,
        ).reshape(a.shape)
        return product / jnp.max(jnp.abs(product), axis=(-2, -1), keepdims=True)

    maps = jax.lax.associative_scan(compose, jnp.broadcast_to(step, (length, 2, 2)))
    p0 = jnp.asarray(initial_variance, dtype)
    p = (maps[:, 0, 0] * p0 + maps[:, 0, 1]) / (maps[:, 1, 0] * p0 + maps[:, 1, 1])
    before = jnp.concatenate([p0[None], p[:-1]]) + q
    return before / (before + r)


def linear_recurrence(decay, drive, axis=-1):
    """x_t = decay_t x_{t-1} + drive_t with x_0 = 0, as an associative scan along `axis`."""

    def compose(first, second):
        return second[0] * first[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(compose, (decay, drive), axis=axis)[1]


def kalman_filtered(z, process_noise, measurement_noise, initial_variance):
    """Causal Kalman estimate of a slowly moving latent from observations z, [B,T] -> [B,T].

    x_0 = 0,  x_t = (1 - K_t) x_{t-1} + K_t z_t  with the gains clipped to [1e-6, 1 - 1e-6].
    """
    gains = kalman_gains(z.shape[-1], process_noise, measurement_noise, initial_variance, z.dtype)
    gains = jnp.clip(gains, 1e-6, 1 - 1e-6)
    return linear_recurrence(jnp.broadcast_to(1 - gains, z.shape), gains * z)
