"""Every family against `transformers`: logits, gradients, cached decoding, export, errors."""

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

from models import Transformer, init_cache, logits, preset
from models import init as init_params
from models.checkpoints import SHARD_BYTES, config_to_hf, load_hf, save_hf, tensor_names
from models.tree import flatten, unflatten
from tests.models.families import CASES, COLUMNS, batch, build, torch_logits

TOKENS, POSITIONS = batch()
LIVE = POSITIONS >= 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns a function from a case to (torch model, directory, config, params), made once."""
    made = {}

    def get(case):
        if case not in made:
            path = tmp_path_factory.mktemp(case)
            model = build(case)
            model.save_pretrained(path)
            made[case] = (model, path, *load_hf(path))
        return made[case]

    return get


def forward(config, params, tokens=TOKENS, positions=POSITIONS):
    hidden = Transformer(config).apply({"params": params}, tokens, positions).hidden
    return logits(params, config, hidden)


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_cached_decoding(case, checkpoint):
    model, _, config, params = checkpoint(case)
    expected = torch_logits(model, TOKENS, POSITIONS)

    def mean_log_prob(params):
        scores = forward(config, params)
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(scores[:, :-1]), TOKENS[:, 1:, None], axis=-1
        )[..., 0]
        live = LIVE[:, :-1]
        return jnp.sum(picked * live) / live.sum(), scores

    (_, scores), gradient = jax.jit(jax.value_and_grad(mean_log_prob, has_aux=True))(params)
    np.testing.assert_allclose(
        np.asarray(scores)[LIVE], expected.detach().numpy()[LIVE], atol=1e-4, rtol=0
    )

    picked = expected[:, :-1].log_softmax(-1).gather(-1, torch.tensor(TOKENS[:, 1:, None]).long())
    live = torch.tensor(LIVE[:, :-1])
    model.zero_grad()
    ((picked[..., 0] * live).sum() / live.sum()).backward()
    theirs = torch_gradients(model, config)
    for path, ours in flatten(gradient).items():
        wanted = theirs[path]
        scale = np.abs(wanted).max()
        assert scale > 0, path
        np.testing.assert_allclose(np.asarray(ours), wanted, atol=1e-3 * scale, err_msg=path)

    # Past the sliding windows of 4 and 5, with ragged prompts of 6 columns.
    step = jax.jit(lambda t, p, c: Transformer(config).apply({"params": params}, t, p, cache=c))
    out = step(TOKENS[:, :6], POSITIONS[:, :6], init_cache(config, len(TOKENS), COLUMNS))
    hidden = [out.hidden]
    for s in range(6, COLUMNS):
        out = step(TOKENS[:, s : s + 1], POSITIONS[:, s : s + 1], out.cache)
        hidden.append(out.hidden)
    decoded = logits(params, config, jnp.concatenate(hidden, axis=1))
    np.testing.assert_allclose(
        np.asarray(decoded)[LIVE], np.asarray(scores)[LIVE], atol=1e-4, rtol=0
    )


def torch_gradients(model, config):
    """The torch model's gradients under our names and in our layout."""
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    found = {}
    for path, (name, row) in tensor_names(config).items():
        if "/moe/" in path and "router" not in path:
            # In memory, transformers fuses the experts that it stores apart.
            fused = (
                ".mlp.experts.down_proj" if path.endswith("down") else ".mlp.experts.gate_up_proj"
            )
            stack = np.stack(
                [gradients[f"model.layers.{i}{fused}"] for i in range(config.num_layers)]
            )
            half = {"gate": slice(0, config.expert_size), "up": slice(config.expert_size, None)}
            stack = stack[:, :, half.get(path.split("/")[-1], slice(None))]
            found[path] = np.swapaxes(stack, -1, -2)
            continue
        name = name.replace("block_sparse_moe", "mlp")
        if name.format(layer=0) not in gradients:
            continue
        count = config.num_layers if "{layer}" in name else 1
        stack = np.stack([gradients[name.format(layer=i)] for i in range(count)])
        if path.endswith("kernel"):
            stack = np.swapaxes(stack, -1, -2)
        found[path] = stack if "{layer}" in name else stack[0]
        if config.family == "phi3" and path.split("/")[-2] in ("q", "k", "v", "gate", "up"):
            sizes = {
                "q": config.num_heads * config.head_dim,
                "gate": config.mlp_size,
                "up": config.mlp_size,
            }
            width = sizes.get(path.split("/")[-2], config.num_kv_heads * config.head_dim)
            found[path] = found[path][..., row : row + width]
    return found


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
        bos_id, eos_id, pad_id = 5, 6, 7

    config = preset("nano")
    save_hf(tmp_path, config, init_params(config, jax.random.key(0)), Tokenizer())
    written = json.loads((tmp_path / "config.json").read_text())
    assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [5, 6, 7]


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
