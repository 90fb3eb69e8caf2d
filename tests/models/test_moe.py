"""Routing: the sorted computation equals the dense sum, and recorded routes replay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import init_cache, override, preset
from models.moe import SparseMLP, route_change
from tests.models import small
from tests.models.small import enlarged

CONFIG = preset("nano", num_layers=2, num_experts=5, experts_per_token=2, expert_size=24)
TOKENS = jax.random.randint(jax.random.key(1), (3, 9), 0, 128)
POSITIONS = jnp.broadcast_to(jnp.arange(9), (3, 9))


def run(config, params, tokens=TOKENS, positions=POSITIONS, **kwargs):
    return small.run(config, params, tokens, positions, **kwargs)


@pytest.mark.parametrize("norm_topk", [True, False])
def test_equals_the_dense_sum_over_experts(norm_topk):
    config = override(CONFIG, norm_topk=norm_topk)
    x = jax.random.normal(jax.random.key(2), (2, 4, 32))
    module = SparseMLP(config)
    params = jax.tree.map(lambda leaf: leaf * 20, module.init(jax.random.key(3), x)["params"])

    def dense(params):
        probabilities = jax.nn.softmax(x @ params["router"]["kernel"])
        kth = jnp.sort(probabilities, axis=-1)[..., -2:-1]
        weights = jnp.where(probabilities >= kth, probabilities, 0.0)
        if norm_topk:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        inner = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, params["gate"]))
        inner = inner * jnp.einsum("bsd,edf->bsef", x, params["up"])
        return jnp.einsum("bsef,efd,bse->bsd", inner, params["down"], weights)

    def sparse(params):
        return module.apply({"params": params}, x)[0]

    np.testing.assert_allclose(sparse(params), dense(params), atol=1e-5)
    gradients = [jax.grad(lambda p, f=f: jnp.sum(f(p) ** 3))(params) for f in (sparse, dense)]
    scale = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), gradients[1])
    jax.tree.map(lambda a, b, s: np.testing.assert_allclose(a, b, atol=1e-5 * s), *gradients, scale)


def test_replay_is_identical_and_reroutes_another_model():
    params, other = enlarged(CONFIG), enlarged(CONFIG, seed=5)
    recorded = run(CONFIG, params, capture=("routes",))
    routes = recorded.captured["routes"]
    assert routes.shape == (2, 3, 9, 2) and routes.dtype == jnp.int32
    np.testing.assert_array_equal(run(CONFIG, params, routes=routes).hidden, recorded.hidden)

    own = run(CONFIG, other, capture=("routes",)).captured["routes"]
    replayed = run(CONFIG, other, routes=routes, capture=("routes",))
    np.testing.assert_array_equal(replayed.captured["routes"], routes)
    mask = jnp.ones((3, 9))
    assert float(route_change(own, routes, mask)) > 0.2
    assert float(route_change(replayed.captured["routes"], routes, mask)) == 0.0
    # Unrecorded entries are chosen anew.
    partly = run(CONFIG, other, routes=jnp.full_like(routes, -1), capture=("routes",))
    np.testing.assert_array_equal(partly.captured["routes"], own)


def test_replayed_routers_keep_their_gradient():
    params, other = enlarged(CONFIG), enlarged(CONFIG, seed=5)
    routes = run(CONFIG, params, capture=("routes",)).captured["routes"]
    gradient = jax.grad(lambda p: jnp.sum(run(CONFIG, p, routes=routes).hidden ** 3))(other)
    router = gradient["layers"]["block"]["moe"]["router"]["kernel"]
    assert float(jnp.abs(router).max()) > 1e-3


def test_routes_recorded_while_decoding_are_those_of_the_full_pass():
    params = enlarged(CONFIG)
    full = run(CONFIG, params, capture=("routes",)).captured["routes"]
    cache, parts = init_cache(CONFIG, 3, 9), []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
        part = slice(start, stop)
        out = run(
            CONFIG, params, TOKENS[:, part], POSITIONS[:, part], cache=cache, capture=("routes",)
        )
        cache = out.cache
        parts.append(out.captured["routes"])
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=2), full)


def test_route_change_counts_experts_not_order():
    routes = jnp.array([[[[0, 1], [2, 3], [4, 0]]]])  # [L=1, B=1, S=3, k=2]
    other = jnp.array([[[[1, 0], [2, 4], [1, 2]]]])
    for mask, expected in (([[1, 1, 1]], 0.5), ([[1, 1, 0]], 0.25), ([[0, 0, 0]], 0.0)):
        assert float(route_change(routes, other, jnp.array(mask))) == expected
