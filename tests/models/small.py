"""What the tests of the network share: parameters at which every part matters, and one runner."""

import functools

import jax

from models import Transformer, init
from models.tree import flatten, unflatten


def enlarged(config, seed=0, times=8.0):
    """Fresh parameters with larger matrices, so that attention and experts are far from uniform."""
    leaves = flatten(init(config, jax.random.key(seed)))
    return unflatten(
        {path: leaf if "norm" in path else leaf * times for path, leaf in leaves.items()}
    )


@functools.partial(jax.jit, static_argnames=("config", "capture"))
def run(config, params, tokens, positions, **kwargs):
    """The network's Output, compiled once per configuration and shape."""
    return Transformer(config).apply({"params": params}, tokens, positions, **kwargs)
