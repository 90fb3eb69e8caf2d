"""The worked examples of tests/examples, and calls of a paper's function on their arrays."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import losses
from losses.catalogue import annotation, axes, named_outputs

FOLDER = pathlib.Path(__file__).parent.parent / "examples"


@functools.cache
def cases(slug):
    """The worked examples of a paper, as a list of dicts."""
    return tuple(json.loads((FOLDER / f"{slug}.json").read_text()))


def all_cases():
    """(slug, index) of every example of every registered paper that has a file."""
    slugs = [p.slug for p in losses.papers() if (FOLDER / f"{p.slug}.json").exists()]
    return [(slug, i) for slug in slugs for i in range(len(cases(slug)))]


def arrays_of(slug, index=0, dtype=np.float32):
    """The example's arrays as numpy: integers where the function declares them, else `dtype`."""
    function = losses.entry(slug).function
    out = {}
    for name, value in cases(slug)[index]["arrays"].items():
        if value is None:
            continue
        kind = annotation(function, name)
        integral = kind is not None and any(d.startswith("int") for d in kind.dtypes)
        if kind is None and np.asarray(value).dtype.kind in "bi":
            integral = True
        out[name] = np.asarray(value, np.int32 if integral else dtype)
    return out


def hyper_of(slug, index=0):
    """The example's hyperparameters, lists as tuples so that they are hashable."""
    hyper = cases(slug)[index]["hyper"]
    return {k: tuple(v) if isinstance(v, list) else v for k, v in hyper.items()}


def evaluate(slug, arrays, hyper):
    """Outputs by name, and for losses the gradients ("grad_NAME") of all floating arrays.

    For functions that are not losses the gradient is that of the sum of their first output.
    """
    found = losses.entry(slug)
    floating = {k: v for k, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    rest = {k: v for k, v in arrays.items() if k not in floating}

    def run(floating):
        out = named_outputs(found, found.function(**floating, **rest, **hyper))
        first = next(iter(out.values()))
        total = jnp.sum(first) if jnp.issubdtype(first.dtype, jnp.floating) else jnp.zeros(())
        return total, out

    (_, out), grads = jax.value_and_grad(run, has_aux=True)(floating)
    return {**out, **{f"grad_{k}": g for k, g in grads.items()}}


@functools.cache
def _jitted(slug, hyper):
    return jax.jit(lambda arrays: evaluate(slug, arrays, dict(hyper)))


def jitted(slug, arrays, hyper):
    """`evaluate`, compiled once per shape."""
    out = _jitted(slug, tuple(sorted(hyper.items(), key=lambda kv: kv[0])))(arrays)
    return jax.tree.map(np.asarray, out)


def axis_names(slug, name):
    """Axis names of an argument, or () where the function declares none."""
    return axes(losses.entry(slug).function, name) or ()
