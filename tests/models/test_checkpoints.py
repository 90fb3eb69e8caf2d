"""Checkpoints: export and reload, shards, meshes, extra heads, memory, errors."""

import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import Mesh

from models import init as init_params
from models import preset
from models.checkpoints import SHARD_BYTES, config_to_hf, load_hf, save_hf
from models.tree import flatten, unflatten
from tests.models.families import CASES, LIVE, POSITIONS, TOKENS, torch_logits


@pytest.mark.parametrize("case", CASES)
def test_export_and_reload(case, checkpoint, tmp_path):
    model, _, config, params = checkpoint(case)
    save_hf(tmp_path, config, params)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    assert type(back) is type(model)
    for (name, ours), (_, theirs) in zip(
        sorted(back.state_dict().items()), sorted(model.state_dict().items())
    ):
        assert torch.equal(ours, theirs), name
    with torch.no_grad():
        ours, theirs = (torch_logits(m, TOKENS, POSITIONS)[LIVE] for m in (back, model))
    assert torch.equal(ours, theirs)
    again_config, again = load_hf(tmp_path)
    assert again_config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_sharded_files_load_onto_a_mesh(checkpoint, tmp_path, monkeypatch):
    _, _, config, params = checkpoint("qwen3_moe")
    monkeypatch.setattr("models.checkpoints.SHARD_BYTES", 20_000)
    save_hf(tmp_path, config, params)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    _, placed = load_hf(tmp_path, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, placed, params)
    kernel = placed["layers"]["block"]["attention"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (3, 16, 16)
    # transformers reads the shards too.
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(back.lm_head.weight, torch.tensor(np.asarray(params["head"]["kernel"])).T)


def test_saving_again_leaves_nothing_of_the_earlier_model(tmp_path, monkeypatch):
    config = preset("nano", num_layers=2, value_head=True)
    save = [init_params(config, jax.random.key(seed)) for seed in range(3)]
    save[0]["value_head"]["bias"] += 1
    for params, size in zip(save, (10_000, 10**9, 10_000)):
        monkeypatch.setattr("models.checkpoints.SHARD_BYTES", size)
        save_hf(tmp_path, config, params)
        (tmp_path / "consolidated.safetensors").write_bytes(b"another format's file")
        _, back = load_hf(tmp_path, value_head=True)
        jax.tree.map(np.testing.assert_array_equal, back, params)


def test_bfloat16_and_extra_heads_round_trip(checkpoint, tmp_path):
    _, path, config, _ = checkpoint("llama2")
    key = jax.random.key(3)
    wide, params = load_hf(path, "bfloat16", key=key, value_head=True, mtp_heads=1, lora_rank=2)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    params["value_head"]["kernel"] += 1
    lora = params["layers"]["block"]["attention"]["q"]
    lora["lora_b"] += jax.random.normal(key, lora["lora_b"].shape, lora["lora_b"].dtype)
    save_hf(tmp_path, wide, params)
    _, back = load_hf(tmp_path, "bfloat16", value_head=True, mtp_heads=1)
    jax.tree.map(np.testing.assert_array_equal, back["mtp_1"], params["mtp_1"])
    jax.tree.map(np.testing.assert_array_equal, back["value_head"], params["value_head"])
    merged = back["layers"]["block"]["attention"]["q"]["kernel"].astype(jnp.float32)
    change = (
        wide.lora_alpha
        / 2
        * (lora["lora_a"].astype(jnp.float32) @ lora["lora_b"].astype(jnp.float32))
    )
    expected = lora["kernel"].astype(jnp.float32) + change
    np.testing.assert_allclose(merged, expected, rtol=2**-8)
    assert float(jnp.abs(change).max()) > 0.1


def test_special_tokens_are_written(tmp_path):
    class Tokenizer:
        bos_id, eos_id, pad_id, stop_ids = 5, 6, 7, (6, 9)

    config = preset("nano")
    save_hf(tmp_path, config, init_params(config, jax.random.key(0)), Tokenizer())
    written = json.loads((tmp_path / "config.json").read_text())
    assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [5, 6, 7]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.generation_config.eos_token_id == [6, 9]


def test_peak_host_memory(tmp_path):
    config = preset("nano", hidden_size=256, mlp_size=1024, num_layers=8, vocab_size=512)
    params = init_params(config, jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    save_hf(tmp_path, config, params)
    assert size < SHARD_BYTES
    del params
    tracemalloc.start()
    _, loaded = load_hf(tmp_path)
    jax.block_until_ready(loaded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # numpy's buffers, which the loaded arrays may share, counted with everything else.
    assert peak < 1.3 * size, (peak, size)


def test_errors_name_the_tensor(checkpoint, tmp_path):
    _, path, config, params = checkpoint("llama2")
    leaves = flatten(params)
    narrow = {**leaves, "norm/scale": leaves["norm/scale"][:-1]}
    del narrow["layers/block/attention/k/kernel"]
    save_hf(tmp_path, config, unflatten(narrow))
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    for part in (
        "missing model.layers.2.self_attn.k_proj.weight (16, 32)",
        "model.norm.weight is (31,), expected (32,)",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"unexpected lm_head.weight|expected \(96, 32\)"):
        load_hf(path, mlp_size=96)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "qwen4", "unknown model family 'qwen4'.*did you mean 'qwen"),
        ("rope_parameters", {"rope_type": "yarm", "rope_theta": 1e4}, "RoPE type 'yarm'.*'yarn'"),
        ("mlp_bias", True, "mlp_bias=True is not supported"),
        ("hidden_act", "relu", "unknown activation 'relu'"),
    ],
)
def test_unsupported_settings_are_named(field, value, message, checkpoint, tmp_path):
    _, path, _, _ = checkpoint("llama2")
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    settings = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, field: value}))
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path)


def test_empty_directories_are_named(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_hf(tmp_path)
    shutil.copy(checkpoint("llama2")[1] / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="no .*safetensors.*config.json"):
        load_hf(tmp_path)


def test_a_family_that_cannot_express_a_setting():
    with pytest.raises(ValueError, match="'llama' cannot express qk_norm=True"):
        config_to_hf(preset("nano", qk_norm=True))
    with pytest.raises(ValueError, match="unknown model family 'lama'.*'llama'"):
        config_to_hf(preset("nano", family="lama"))
