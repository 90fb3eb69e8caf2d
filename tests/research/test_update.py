"""One gradient on any devices, with any micro-batches, for every paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import losses
from research import devices, update
from tests.core import core_first
from tests.losses import examples

LAYOUTS = [(1, 4, ""), (8, 1, ""), (2, 2, ""), (1, 1, "data:2,fsdp:2,tensor:2")]
"""(devices, micro-batches, mesh), each compared with one device, one micro-batch."""


def trained_papers():
    """Papers whose example has a gradient to a statistic of each response."""
    chosen = []
    for p in losses.papers():
        arrays = examples.cases(p.slug)[0]["arrays"]
        paths = [g for g in p.gradients if arrays.get(g) is not None]
        if paths and all(examples.axis_names(p.slug, g)[:1] == ("B",) for g in paths):
            chosen.append(p.slug)
    return chosen


def problem(slug, dtype):
    """A small model whose statistics are the example's arrays, bent by its parameters."""
    arrays, hyper = examples.arrays_of(slug, dtype=dtype), examples.hyper_of(slug)
    paths = [g for g in losses.entry(slug).gradients if g in arrays]
    rows = {g: arrays[g] for g in paths}
    constants = {k: v for k, v in arrays.items() if k not in paths}
    params = {"w": np.linspace(-0.3, 0.4, 5).astype(dtype), "scale": np.ones((), dtype)}

    def statistics(params, rows):
        out = {}
        for i, (name, x) in enumerate(sorted(rows.items())):
            bend = jnp.tanh(x * params["w"][i % 5]) * params["w"][(i + 1) % 5]
            out[name] = x * params["scale"] + bend * jnp.sin(3.0 * x)
        return out

    def loss(statistics, constants):
        return losses.entry(slug).function(**statistics, **constants, **hyper)

    return params, rows, constants, statistics, loss


def gradient(slug, dtype, count, microbatches, mesh, loss=None):
    params, rows, constants, statistics, whole = problem(slug, dtype)
    plan = devices.layout(count, mesh)
    total = len(next(iter(rows.values())))
    padded = devices.pad_rows(rows, plan.count * microbatches)
    compute = functools.partial(
        update.loss_and_gradient,
        statistics,
        loss or whole,
        total_rows=total,
        microbatches=microbatches,
        axis=plan.axis,
    )
    if plan.kind == "pmap":
        shards = {k: v.reshape(count, -1, *v.shape[1:]) for k, v in padded.items()}
        run = jax.pmap(compute, axis_name=plan.axis, in_axes=(None, 0, None), devices=plan.devices)
        value, _, grads = run(params, shards, constants)
        for leaf in jax.tree.leaves((value, grads)):
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
        value, grads = jax.tree.map(lambda x: x[0], (value, grads))
    else:
        value, _, grads = jax.jit(compute)(params, plan.shard_rows(padded), constants)
    return np.asarray(value), jax.tree.map(np.asarray, grads)


def assert_equal(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        scale = max(1e-3, np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("slug", core_first(trained_papers()))
def test_any_devices_and_microbatches_give_one_gradient(slug):
    with jax.enable_x64(True):
        expected = gradient(slug, np.float64, 1, 1, "")
        assert any(np.any(g != 0) for g in jax.tree.leaves(expected[1]))
        for layout in LAYOUTS:
            assert_equal(gradient(slug, np.float64, *layout), expected, 1e-10)
    single = gradient(slug, np.float32, 1, 1, "")
    assert_equal(gradient(slug, np.float32, 2, 2, ""), single, 1e-5)


def test_a_token_mean_averaged_over_shards_is_caught():
    """The negative control: each shard's own mean, averaged, is another gradient."""
    params, rows, constants, statistics, loss = problem("dapo", np.float64)

    def sharded_mean(found, constants):
        halves = [
            loss(*({k: v[part] for k, v in x.items()} for x in (found, constants)))[0]
            for part in (slice(0, 2), slice(2, 4))
        ]
        return sum(halves) / 2, {}

    with jax.enable_x64(True):
        right = gradient("dapo", np.float64, 2, 1, "")
        wrong = gradient("dapo", np.float64, 2, 1, "", loss=sharded_mean)
        with pytest.raises(AssertionError):
            assert_equal(wrong, right, 1e-3)


def test_a_non_finite_gradient_changes_nothing_and_is_counted():
    params = {"w": jnp.ones(3)}
    optimizer = optax.adam(0.1)

    def loss(found, constants):
        return jnp.sum(found["x"] * constants["c"]), {"seen": jnp.ones(())}

    step = jax.jit(
        update.make_update(
            lambda p, frozen, rows: {"x": rows["x"] * p["w"]},
            loss,
            optimizer,
            total_rows=2,
            ema=0.9,
        )
    )
    state = update.initial_state(params, optimizer, True)
    rows = {"x": jnp.ones((2, 3))}
    bad, metrics = step(state, {}, rows, {"c": jnp.full((2, 3), jnp.nan)})
    assert not metrics["scalars"]["finite"] and bad.skipped == 1 and bad.updates == 1
    for a, b in zip(jax.tree.leaves((bad.params, bad.opt_state, bad.ema)),
                    jax.tree.leaves((state.params, state.opt_state, state.ema))):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    good, metrics = step(bad, {}, rows, {"c": jnp.ones((2, 3))})
    assert metrics["scalars"]["finite"] and good.skipped == 1
    assert not np.allclose(good.params["w"], state.params["w"])
    np.testing.assert_allclose(good.ema["w"], 0.9 * state.ema["w"] + 0.1 * good.params["w"])
