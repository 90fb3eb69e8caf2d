"""Properties that every paper of the catalogue has, on the arrays of its worked example."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from tests.losses import examples
from tests.losses.exceptions import EXCEPTIONS

CASES = examples.all_cases()
SLUGS = sorted({slug for slug, _ in CASES})


def papers_with(property_name, array=None, axes=None):
    """Slugs whose example has the array (with these axes), as test parameters.

    A paper that departs from the property by its own definition is skipped with that reason.
    """
    chosen = []
    for slug in SLUGS:
        given = {
            k for k, v in examples.cases(slug)[0]["arrays"].items()
            if v is not None and (axes is None or examples.axis_names(slug, k) == axes)
        }  # fmt: skip
        if array is None or array in given:
            reason = EXCEPTIONS.get((slug, property_name))
            marks = [pytest.mark.skip(reason=f"{slug}: {reason}")] if reason else []
            chosen.append(pytest.param(slug, marks=marks))
    return chosen


def rows_of(slug, arrays):
    """Names of the arrays whose first axis counts responses."""
    return {k for k in arrays if examples.axis_names(slug, k)[:1] == ("B",)}


def numbers(tree):
    return {k: np.asarray(v) for k, v in tree.items() if k != "metrics" and not isinstance(v, dict)}


def assert_close(actual, expected, rtol, atol, context=""):
    for name in expected:
        scale = max(1.0, float(np.max(np.abs(np.nan_to_num(expected[name])), initial=0.0)))
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=rtol, atol=atol * scale, err_msg=f"{context} {name}"
        )


def assert_finite(out, context=""):
    for name, value in numbers(out).items():
        assert np.all(np.isfinite(value)), f"{context} {name}: {value}"
    for name, value in out.get("metrics", {}).items():
        assert np.all(np.isfinite(np.asarray(value, float))), f"{context} metric {name}: {value}"


def test_every_registered_paper_has_a_worked_example():
    missing = [p.slug for p in losses.papers() if not (examples.FOLDER / f"{p.slug}.json").exists()]
    assert not missing


@pytest.mark.parametrize("slug,index", CASES)
def test_worked_example(slug, index):
    """Values and gradients in float64 to the printed digits, in float32 to its rounding."""
    found, case = losses.entry(slug), examples.cases(slug)[index]
    assert case["function"] == found.name and case["kind"] == found.kind
    hyper = examples.hyper_of(slug, index)
    for name, value in case["hyper"].items():
        assert name in found.hyper, f"{found.name} has no hyperparameter {name} (= {value})"
    with jax.enable_x64(True):
        exact = examples.jitted(slug, examples.arrays_of(slug, index, np.float64), hyper)
    single = examples.jitted(slug, examples.arrays_of(slug, index, np.float32), hyper)
    first = found.outputs[0]
    compared = 0
    for name, expected in case["expect"].items():
        key = first if name in ("value", "loss") else name
        expected = np.asarray(expected, float)
        for out, rtol, atol in ((exact, 1e-8, 2e-9), (single, 5e-5, 2e-6)):
            actual = out[key] if key in out else out.get("metrics", {}).get(key)
            assert actual is not None, f"{slug} returns no {name}"
            assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
            assert_close({name: actual}, {name: expected}, rtol, atol, slug)
            compared += 1
    assert compared
    for name in found.gradients:
        given = name in case["arrays"] and case["arrays"][name] is not None
        assert not given or f"grad_{name}" in case["expect"], f"no gradient printed for {name}"


@pytest.mark.parametrize("slug,index", CASES)
def test_constants_carry_no_gradient(slug, index):
    found = losses.entry(slug)
    out = examples.jitted(slug, examples.arrays_of(slug, index), examples.hyper_of(slug, index))
    for name, value in out.items():
        if name.startswith("grad_") and name.removeprefix("grad_") not in found.gradients:
            np.testing.assert_array_equal(value, 0, err_msg=name)


@pytest.mark.parametrize("slug", SLUGS)
def test_eager_equals_jit_equals_pmap_over_four_devices(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    compiled = numbers(examples.jitted(slug, arrays, hyper))
    eager = losses.entry(slug).function(**arrays, **hyper)
    first = eager[0] if isinstance(eager, tuple) else eager
    name = losses.entry(slug).outputs[0]
    assert_close({name: np.asarray(first)}, {name: compiled[name]}, 1e-5, 1e-6, "eager")
    stacked = {k: np.stack([v] * 4) for k, v in arrays.items()}
    mapped = jax.pmap(lambda a: examples.evaluate(slug, a, hyper), devices=jax.devices()[:4])(
        stacked
    )
    for name, value in numbers(mapped).items():
        for shard in value:
            assert_close({name: shard}, {name: compiled[name]}, 1e-5, 1e-6, "pmap")


@pytest.mark.parametrize("slug", papers_with("permutation"))
def test_permuting_responses_and_renaming_groups(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    rows = rows_of(slug, arrays)
    if not rows:
        return  # nothing in it counts responses
    n = arrays[min(rows)].shape[0]
    order = np.random.default_rng(0).permutation(n)
    moved = dict(arrays)
    for name in rows:
        for axis, axis_name in enumerate(examples.axis_names(slug, name)):
            if axis_name == "B":
                moved[name] = np.take(moved[name], order, axis)
    for name in moved:
        if name.endswith("group_ids"):
            moved[name] = 1000 - 7 * moved[name]
    before = numbers(examples.jitted(slug, arrays, hyper))
    after = numbers(examples.jitted(slug, moved, hyper))
    for name, value in before.items():
        by_row = name.removeprefix("grad_") in rows or (
            not name.startswith("grad_") and value.ndim and value.shape[0] == n
        )
        assert_close({name: after[name]}, {name: value[order] if by_row else value}, 1e-5, 1e-6)


def poisoned(slug, arrays, extra_columns):
    """NaN at masked positions, and further columns of padding full of NaN."""
    masked = arrays["mask"] == 0
    out = {}
    for name, value in arrays.items():
        names = examples.axis_names(slug, name)
        if "T" not in names:
            out[name] = value
            continue
        value = value.copy()
        bad = 0 if name.endswith("mask") else (3 if value.dtype.kind == "i" else np.nan)
        if names[:1] == ("B",) and name != "mask" and not name.endswith("_mask"):
            np.moveaxis(value, names.index("T"), 1)[masked] = bad
        widths = [(0, extra_columns if n == "T" else 0) for n in names]
        out[name] = np.pad(value, widths, constant_values=bad)
    return out


@pytest.mark.parametrize("slug", papers_with("padding", "mask", ("B", "T")))
def test_growing_the_padding_and_garbage_behind_the_mask(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    length = arrays["mask"].shape[1]
    before = numbers(examples.jitted(slug, arrays, hyper))
    after = numbers(examples.jitted(slug, poisoned(slug, arrays, 2), hyper))
    for name, value in before.items():
        grown = after[name]
        for axis in (i for i, n in enumerate(value.shape) if grown.shape[i] != n):
            np.testing.assert_array_equal(np.take(grown, [length, length + 1], axis), 0, name)
            grown = np.take(grown, range(length), axis)
        assert_close({name: grown}, {name: value}, 1e-5, 1e-6)


@pytest.mark.parametrize("slug", papers_with("masked_row", "mask", ("B", "T")))
def test_a_fully_masked_row_contributes_nothing(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    rows = rows_of(slug, arrays)
    grown = {}
    for name, value in arrays.items():
        if name in rows:
            last = value[-1:].copy()
            if name == "mask":
                last[:] = 0
            elif name == "group_ids":
                last[:] = value.max() + 1
            elif value.dtype.kind == "f" and examples.axis_names(slug, name)[1:2] == ("T",):
                last[:] = 0 if name.endswith("_mask") else np.nan
            value = np.concatenate([value, last])
        grown[name] = value
    out = examples.jitted(slug, grown, hyper)
    assert_finite(out, slug)
    for name in losses.entry(slug).gradients:
        if name in rows and examples.axis_names(slug, name)[:2] == ("B", "T"):
            np.testing.assert_array_equal(out[f"grad_{name}"][-1], 0)


@pytest.mark.parametrize("slug", papers_with("nothing_valid", "mask", ("B", "T")))
def test_nothing_valid_gives_zero_and_no_nan(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    out = examples.jitted(slug, {**arrays, "mask": np.zeros_like(arrays["mask"])}, hyper)
    assert_finite(out, slug)
    if "loss" in out:
        assert out["loss"] == 0
        for name in losses.entry(slug).gradients:
            if f"grad_{name}" in out:
                np.testing.assert_array_equal(out[f"grad_{name}"], 0)


@pytest.mark.parametrize("slug", papers_with("extreme"))
def test_extreme_log_ratios_stay_finite(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    logs = [k for k in arrays if k.endswith("logprobs")]
    rng = np.random.default_rng(1)
    for name in logs:
        signs = rng.integers(0, 2, arrays[name].shape)
        arrays[name] = np.where(signs, -50.0, -1e-6).astype(np.float32)
    assert_finite(examples.jitted(slug, arrays, hyper), slug)


@pytest.mark.parametrize("slug", papers_with("equal_rewards", "rewards", ("B",)))
def test_equal_rewards_give_no_signal(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    arrays["rewards"] = np.full_like(arrays["rewards"], 0.3)
    if "group_ids" in arrays:
        arrays["group_ids"] = np.zeros_like(arrays["group_ids"])
    out = examples.jitted(slug, arrays, hyper)
    assert_finite(out, slug)
    if losses.entry(slug).kind == "advantage":
        np.testing.assert_array_equal(out[losses.entry(slug).outputs[0]], 0)


@pytest.mark.parametrize("slug", papers_with("group_of_one", "group_ids", ("B",)))
def test_groups_of_one_stay_finite(slug):
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    arrays["group_ids"] = np.arange(len(arrays["group_ids"]), dtype=np.int32) * 3
    assert_finite(examples.jitted(slug, arrays, hyper), slug)


@pytest.mark.parametrize("slug", [p.slug for p in losses.papers() if p.split is not None])
def test_streamed_statistics_equal_the_dense_function(slug):
    found = losses.entry(slug)
    arrays, hyper = examples.arrays_of(slug), examples.hyper_of(slug)
    tokens, reduce = found.split

    def streamed(logits):
        all_arrays = {**arrays, "logits": logits}
        statistics = tokens(**_accepted(tokens, all_arrays), **_accepted(tokens, hyper))
        rest = _accepted(reduce, all_arrays)
        return reduce(**statistics, **rest, **_accepted(reduce, hyper))[0]

    value, grad = jax.value_and_grad(streamed)(jnp.asarray(arrays["logits"]))
    dense = examples.jitted(slug, arrays, hyper)
    expected = {"loss": dense["loss"], "grad": dense["grad_logits"]}
    assert_close({"loss": value, "grad": grad}, expected, 1e-5, 1e-6)


def _accepted(function, given):
    return {k: v for k, v in given.items() if k in inspect.signature(function).parameters}
