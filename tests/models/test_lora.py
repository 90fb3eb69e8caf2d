"""Adapters: exact splitting, the identity at the start, merging, and the PEFT layout."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import init, override, preset
from models.lora import combine, load_peft, merge, partition, save_peft
from models.tree import flatten
from tests.models.small import run

BASE = preset("nano", num_layers=2, value_head=True)
ADAPTED = override(BASE, lora_rank=3, lora_targets=("q", "v", "o", "down"))
KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (2, 7), 0, 128)
POSITIONS = jnp.broadcast_to(jnp.arange(7), (2, 7))


def trained(config):
    """Parameters whose adapters have moved away from the identity."""
    trainable, frozen = partition(init(config, KEY))
    leaves, structure = jax.tree.flatten(trainable)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [leaf + 0.3 * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys)]
    return combine(jax.tree.unflatten(structure, moved), frozen)


def hidden(config, params):
    return run(config, params, TOKENS, POSITIONS).hidden


def test_partition_and_combine_are_inverse():
    params = init(ADAPTED, KEY)
    trainable, frozen = partition(params)
    names = flatten(trainable)
    assert len(names) == 4 * 2 + 2
    assert all("lora_" in name or name.startswith("value_head") for name in names)
    assert not set(names) & set(flatten(frozen))
    back = combine(trainable, frozen)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    plain = init(BASE, KEY)
    assert partition(plain)[1] == {}
    jax.tree.map(np.testing.assert_array_equal, combine(*partition(plain)), plain)


def test_starts_as_the_base_model_and_learns_through_b():
    params = init(ADAPTED, KEY)
    base = combine({}, partition(params)[1])
    np.testing.assert_array_equal(hidden(ADAPTED, params), hidden(BASE, base))
    trainable, frozen = partition(params)
    gradient = jax.grad(lambda t: jnp.sum(hidden(ADAPTED, combine(t, frozen)) ** 3))(trainable)
    for name, leaf in flatten(gradient).items():
        if "lora" in name:
            assert jnp.any(leaf != 0) == name.endswith("lora_b"), name


def test_merge_equals_the_adapted_model():
    params = trained(ADAPTED)
    merged = merge(params, ADAPTED)
    assert not any("lora" in name for name in flatten(merged))
    adapted = hidden(ADAPTED, params)
    np.testing.assert_allclose(hidden(BASE, merged), adapted, atol=1e-5)
    base = combine({}, partition(params)[1])
    assert float(jnp.abs(adapted - hidden(BASE, base)).max()) > 0.1
    plain = init(BASE, KEY)
    jax.tree.map(np.testing.assert_array_equal, merge(plain, BASE), plain)


def test_peft_layout_round_trip(tmp_path):
    params = trained(ADAPTED)
    save_peft(tmp_path, ADAPTED, params)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 2
    # As PEFT applies it: y = x W^T + (alpha / r) (x A^T) B^T.
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "v_proj", "o_proj", "down_proj"]
    prefix = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    a, b = (tensors[f"{prefix}{matrix}.weight"] for matrix in "AB")
    assert a.shape == (3, 64) and b.shape == (32, 3)
    name = "layers/block/mlp/down/kernel"
    change = flatten(merge(params, ADAPTED))[name][1] - flatten(params)[name][1]
    np.testing.assert_allclose(
        settings["lora_alpha"] / settings["r"] * (b @ a).T, change, atol=1e-6
    )

    base = merge(combine({}, partition(params)[1]), ADAPTED)
    config, back = load_peft(tmp_path, override(BASE, value_head=False), base)
    assert config == override(ADAPTED, value_head=False)
    np.testing.assert_array_equal(hidden(config, back), hidden(ADAPTED, params))


def test_peft_errors_name_the_tensor(tmp_path):
    params = trained(ADAPTED)
    base = combine({}, partition(params)[1])
    with pytest.raises(ValueError, match="lora_rank=0"):
        save_peft(tmp_path, BASE, base)
    with pytest.raises(ValueError, match="phi3.*fused"):
        save_peft(tmp_path, override(ADAPTED, family="phi3"), params)
    save_peft(tmp_path, ADAPTED, params)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    prefix = "base_model.model.model.layers.0.self_attn."
    del tensors[prefix + "q_proj.lora_A.weight"]
    tensors[prefix + "v_proj.lora_B.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        load_peft(tmp_path, BASE, base)
    assert f"missing {prefix}q_proj.lora_A.weight" in str(error.value)
    assert f"{prefix}v_proj.lora_B.weight is (2, 2), expected (16, 3)" in str(error.value)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, message in (
        ({"target_modules": ["query_proj"]}, "unknown target module 'query_proj'"),
        ({"use_dora": True}, "use_dora"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(ValueError, match=message):
            load_peft(tmp_path, BASE, base)
