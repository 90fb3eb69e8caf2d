"""Sharding rules: every parameter has one, and the sharded network computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models import Transformer, init, preset
from models.sharding import leaf_spec, param_specs, shard
from models.tree import flatten
from tests.models.small import enlarged

MESH = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, 128)
POSITIONS = jnp.broadcast_to(jnp.arange(8), (4, 8))
CONFIGS = {
    "dense": preset("nano", num_kv_heads=2, num_layers=2, qkv_bias=True, lora_rank=2, mtp_heads=1),
    "experts": preset("nano", num_experts=4, expert_size=16, tie_embeddings=False, value_head=True),
}


def test_rules():
    specs = flatten(param_specs(init(CONFIGS["dense"], jax.random.key(0)), MESH))
    block = "layers/block/"
    assert specs["embed/embedding"] == P("tensor", "fsdp")
    assert specs[block + "attention/q/kernel"] == P(None, "fsdp", "tensor")
    assert specs[block + "attention/q/bias"] == P(None, "tensor")
    assert specs[block + "attention/q/lora_a"] == P(None, "fsdp", None)
    assert specs[block + "attention/o/lora_a"] == P(None, "tensor", None)
    assert specs[block + "mlp/down/kernel"] == P(None, "tensor", "fsdp")
    assert specs[block + "mlp_norm/scale"] == P(None, None)
    assert specs["mtp_1/block/mlp/up/kernel"] == P("fsdp", "tensor")
    experts = flatten(param_specs(init(CONFIGS["experts"], jax.random.key(0)), MESH))
    assert experts[block + "moe/gate"] == P(None, "tensor", "fsdp", None)
    assert experts[block + "moe/down"] == P(None, "tensor", None, "fsdp")
    assert experts["value_head/kernel"] == P(None)


def test_axes_that_do_not_fit_are_left_out():
    assert leaf_spec("head/kernel", (30, 7), MESH) == P("fsdp", None)
    line = Mesh(np.asarray(jax.devices()), ("data",))
    assert leaf_spec("head/kernel", (32, 8), line) == P(None, None)
    with pytest.raises(ValueError, match=r"'adapter/weird' of shape \(3, 4\)"):
        leaf_spec("adapter/weird", (3, 4), MESH)


@pytest.mark.parametrize("name", CONFIGS)
def test_sharded_gradient_equals_that_of_one_device(name):
    config = CONFIGS[name]
    params = enlarged(config)

    @jax.jit
    def gradient(params, tokens, positions):
        def loss(params):
            out = Transformer(config).apply({"params": params}, tokens, positions)
            return jnp.mean(out.hidden**3)

        return jax.grad(loss)(params)

    expected = gradient(params, TOKENS, POSITIONS)
    placed = shard(params, MESH)
    up = placed["layers"]["block"]["attention"]["q"]["kernel"]
    assert up.addressable_shards[0].data.size * 4 == up.size
    rows = NamedSharding(MESH, P(("data", "fsdp")))
    found = gradient(placed, *(jax.device_put(x, rows) for x in (TOKENS, POSITIONS)))
    for path, wanted in flatten(expected).items():
        scale = max(float(jnp.abs(wanted).max()), 1e-3)
        np.testing.assert_allclose(flatten(found)[path], wanted, atol=1e-4 * scale, err_msg=path)
