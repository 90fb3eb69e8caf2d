"""The exact update: any number of devices, any number of micro-batches, one gradient.

The model maps tokens to per-token statistics, the objective maps the statistics of the WHOLE batch
to a scalar. The statistics are small ([B,T]), so every device gathers all of them, evaluates the
same global loss, takes the gradient with respect to the statistics, and pulls its own rows of that
gradient back through its own rows of the model:

    dL/dtheta = sum_shards sum_microbatches  (d stats / d theta)^T  dL/d stats

which is the chain rule, split by rows, and therefore equal to the single-device, single-pass
gradient to rounding, whatever the objective couples: token-mean denominators, group statistics,
batch quantiles, contrastive terms.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class State:
    """What an update changes.

    Attributes:
      params: the trainable parameters.
      opt_state: optax state, of the same layout as the parameters.
      ema: averaged trainable parameters, or None.
      updates: optimizer steps attempted.
      skipped: of those, skipped for a non-finite loss or gradient.
    """

    params: Any
    opt_state: Any
    ema: Any
    updates: jax.Array
    skipped: jax.Array


def initial_state(params, optimizer, ema: bool) -> State:
    """Returns the state before the first update."""
    zero = jnp.zeros((), jnp.int32)
    average = jax.tree.map(jnp.array, params) if ema else None
    return State(params, optimizer.init(params), average, zero, zero)


def loss_and_gradient(
    statistics: Callable,
    loss: Callable,
    params,
    rows: Mapping[str, jax.Array],
    constants: Mapping[str, jax.Array],
    *,
    total_rows: int,
    microbatches: int = 1,
    axis: str | None = None,
):
    """Loss of the whole batch and its exact gradient, from the rows of one shard.

    With one micro-batch this is one forward and one backward pass. With more, the statistics are
    computed first, slice by slice, and each slice's forward pass is run again for its backward.

    Args:
      statistics: (params, rows) -> dict of arrays [b, ...], differentiable, row by row.
      loss: (statistics [total_rows, ...], constants) -> (scalar, metrics).
      params: the parameters to differentiate.
      rows: arrays [b, ...] of this shard; b is a multiple of `microbatches`. Rows beyond the
        batch's own (padding to equal shards) come last.
      constants: whole-batch arrays.
      total_rows: rows of the batch, padding excluded.
      microbatches: slices of the shard that go through the model at a time.
      axis: name of the mapped axis over which the batch is spread, or None.

    Returns:
      (loss, metrics, gradient), the same on every shard.
    """
    if microbatches == 1:
        local, pull = jax.vjp(lambda p: statistics(p, rows), params)
    else:
        slices = jax.tree.map(
            lambda x: x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:]), rows
        )
        local = jax.lax.map(lambda r: statistics(params, r), slices)
        local = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), local)

        def pull(cotangent):
            cotangents = jax.tree.map(
                lambda x: x.reshape(microbatches, -1, *x.shape[1:]), cotangent
            )

            def add(total, slice_and_cotangent):
                part, g = slice_and_cotangent
                gradient = jax.vjp(lambda p: statistics(p, part), params)[1](g)[0]
                return jax.tree.map(jnp.add, total, gradient), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            return (jax.lax.scan(add, zeros, (slices, cotangents))[0],)

    size = next(iter(jax.tree.leaves(rows))).shape[0]
    everyone = local
    if axis is not None:
        everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, axis, tiled=True), local)
    padded_rows = next(iter(jax.tree.leaves(everyone))).shape[0]
    whole = jax.tree.map(lambda x: x[:total_rows], everyone)
    (value, metrics), cotangent = jax.value_and_grad(loss, has_aux=True)(whole, constants)

    def mine(g):
        widths = [(0, padded_rows - total_rows)] + [(0, 0)] * (g.ndim - 1)
        g = jnp.pad(g, widths)
        if axis is None:
            return g
        return jax.lax.dynamic_slice_in_dim(g, jax.lax.axis_index(axis) * size, size)

    (gradient,) = pull(jax.tree.map(mine, cotangent))
    if axis is not None:
        gradient = jax.lax.psum(gradient, axis)
    return value, metrics, gradient


def make_update(
    statistics: Callable,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    *,
    total_rows: int,
    microbatches: int = 1,
    axis: str | None = None,
    ema: float = 0.0,
) -> Callable:
    """Returns `update(state, frozen, rows, constants) -> (state, metrics)`, to be compiled.

    A non-finite loss or gradient leaves the parameters, the optimizer and the average as they were
    and counts in `state.skipped`. `statistics` takes (params, frozen, rows).
    """

    def update(state, frozen, rows, constants):
        value, metrics, gradient = loss_and_gradient(
            lambda params, part: statistics(params, frozen, part),
            loss,
            state.params,
            rows,
            constants,
            total_rows=total_rows,
            microbatches=microbatches,
            axis=axis,
        )
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        changes, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)

        def keep(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        params = keep(params, state.params)
        average = state.ema
        if average is not None:
            average = keep(optax.incremental_update(params, average, 1 - ema), average)
        new = State(
            params=params,
            opt_state=keep(opt_state, state.opt_state),
            ema=average,
            updates=state.updates + 1,
            skipped=state.skipped + ~finite,
        )
        scalars = {k: v for k, v in metrics.items() if jnp.ndim(v) == 0}
        arrays = {k: v for k, v in metrics.items() if jnp.ndim(v) > 0}
        logged = {**scalars, "loss": value, "grad_norm": norm, "finite": finite}
        return new, {"scalars": logged, "arrays": arrays}

    return update


def make_optimizer(config, total_updates: int) -> optax.GradientTransformation:
    """Returns the optax chain of `config.optimizer`.

    Raises:
      ValueError: unknown optimizer or schedule.
    """
    rate, warmup = config.learning_rate, config.warmup_steps
    after = max(total_updates - warmup, 1)
    schedules = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, 0.0, after),
        "cosine": optax.cosine_decay_schedule(rate, after),
    }
    schedule = _named("schedule", schedules, config.schedule)
    if warmup:
        rise = optax.linear_schedule(0.0, rate, warmup)
        schedule = optax.join_schedules([rise, schedule], [warmup])
    moments = {"b1": config.b1, "b2": config.b2}
    decay = config.weight_decay
    optimizers = {
        "adamw": lambda: optax.adamw(schedule, weight_decay=decay, **moments),
        "adam": lambda: optax.adam(schedule, **moments),
        "lion": lambda: optax.lion(schedule, weight_decay=decay, **moments),
        "sgd": lambda: optax.sgd(schedule),
    }
    chosen = _named("optimizer", optimizers, config.name)()
    if config.clip_norm:
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), chosen)
    return chosen


def _named(what, table, name):
    if name not in table:
        from losses.catalogue import nearest

        raise ValueError(
            f"Unknown {what} {name!r}.{nearest(name, list(table))} Known: {', '.join(table)}."
        )
    return table[name]
