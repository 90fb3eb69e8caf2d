"""Hugging Face checkpoints in and out: config.json and safetensors of nine decoder families.

The tables below say where each parameter lives in each family's files. Kernels are stored there as
[out, in] and one tensor per layer; here they are [in, out] and stacked over layers.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import transformers
from jax.sharding import NamedSharding, SingleDeviceSharding
from safetensors import numpy as safetensors_numpy
from safetensors import safe_open

from models.config import ROPE_TYPES, ModelConfig, override, unknown_name
from models.lora import merge
from models.sharding import leaf_spec
from models.transformer import init
from models.tree import flatten, unflatten

# Model type, and the `transformers` class that runs it.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
GEMMA = ("gemma2", "gemma3_text")
EXPERTS = ("mixtral", "qwen3_moe")
BIAS_SWITCH = ("llama", "qwen3", "qwen3_moe", *GEMMA)
WINDOW_ON_EVERY_LAYER = ("mistral", "mixtral", "qwen3_moe", "phi3")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# Heads that the families' own files have no place for.
EXTRA_FILE = "extra_heads.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SPECIAL = ("bos", "eos", "pad")
SHARD_BYTES = 2 * 10**9

# Fields that every family has, under our name and under Hugging Face's.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}


def config_from_hf(hf) -> ModelConfig:
    """Returns the ModelConfig of a `transformers` configuration object.

    Raises:
      ValueError: a family, RoPE type or switch that this transformer does not have.
    """
    family = hf.model_type
    if family not in FAMILIES:
        raise ValueError(unknown_name("model family", family, tuple(FAMILIES)))
    for name, expected in (
        ("mlp_bias", False),
        ("use_bidirectional_attention", False),
        ("mlp_only_layers", False),
        ("decoder_sparse_step", 1),
    ):
        given = getattr(hf, name, expected)
        if (given or False) != expected:
            raise ValueError(f"family {family!r} with {name}={given!r} is not supported")

    rope = hf.rope_parameters
    local_theta = None
    if family == "gemma3_text":
        local, rope = rope["sliding_attention"], rope["full_attention"]
        local_theta = local["rope_theta"]
        if local["rope_type"] != "default":
            raise ValueError(f"RoPE type {local['rope_type']!r} of windowed layers not supported")
    rope = dict(rope)
    theta, fraction = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", 1.0)
    kind = rope["rope_type"]
    if kind not in ("default", *ROPE_TYPES):
        raise ValueError(unknown_name("RoPE type", kind, ("default", *ROPE_TYPES)))
    scaling = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(rope.items()))

    window = getattr(hf, "sliding_window", None)
    pattern = (True,)
    if family not in WINDOW_ON_EVERY_LAYER:
        kinds = getattr(hf, "layer_types", None) or ["full_attention"]
        pattern = tuple(layer == "sliding_attention" for layer in kinds)
        window = window if any(pattern) else None
    bias = family in BIAS_SWITCH and bool(hf.attention_bias)
    activation = hf.hidden_activation if family in GEMMA else hf.hidden_act
    if activation not in ACTIVATIONS:
        raise ValueError(unknown_name("activation", activation, tuple(ACTIVATIONS)))
    experts = {}
    if family in EXPERTS:
        experts = {
            "num_experts": hf.num_local_experts if family == "mixtral" else hf.num_experts,
            "experts_per_token": hf.num_experts_per_tok,
            "expert_size": (
                hf.intermediate_size if family == "mixtral" else hf.moe_intermediate_size
            ),
            "norm_topk": getattr(hf, "norm_topk_prob", True),
        }
    gemma = {}
    if family in GEMMA:
        gemma = {
            "norm_offset": True,
            "post_norms": True,
            "embed_scale": hf.hidden_size**0.5,
            "attention_scale": hf.query_pre_attn_scalar**-0.5,
            "attention_softcap": hf.attn_logit_softcapping,
            "final_softcap": hf.final_logit_softcapping,
        }
    return ModelConfig(
        family=family,
        **{ours: getattr(hf, theirs) for ours, theirs in FIELDS.items()},
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        activation=ACTIVATIONS[activation],
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        sliding_window=window,
        window_pattern=pattern,
        rope_theta=float(theta),
        rope_local_theta=local_theta,
        rope_scaling=None if kind == "default" else scaling,
        rotary_fraction=fraction,
        **experts,
        **gemma,
    )


def config_to_hf(config: ModelConfig):
    """Returns the `transformers` configuration of `config`; the inverse of `config_from_hf`.

    Raises:
      ValueError: a family that is not known, or settings that the family cannot express.
    """
    family = config.family
    if family not in FAMILIES:
        raise ValueError(unknown_name("model family", family, tuple(FAMILIES)))
    rope = {"rope_type": "default", **dict(config.rope_scaling or ())}
    rope = {key: list(v) if isinstance(v, tuple) else v for key, v in rope.items()}
    rope |= {"rope_theta": config.rope_theta, "partial_rotary_factor": config.rotary_fraction}
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.activation]
    fields = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}
    fields |= {
        "head_dim": config.head_dim,
        "hidden_activation" if family in GEMMA else "hidden_act": activation,
        "rope_parameters": rope,
        "sliding_window": config.sliding_window,
        "dtype": config.param_dtype,
        # The families' defaults name tokens that a small vocabulary does not have.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family in BIAS_SWITCH:
        fields["attention_bias"] = config.o_bias
    if family.startswith("qwen"):
        fields["use_sliding_window"] = config.sliding_window is not None
    if family == "qwen3_moe":
        fields["norm_topk_prob"] = config.norm_topk
        fields["moe_intermediate_size"] = config.expert_size
    if family not in WINDOW_ON_EVERY_LAYER and family != "llama":
        names = ("full_attention", "sliding_attention")
        fields["layer_types"] = [names[kind] for kind in config.layer_kinds]
    if family in EXPERTS:
        count = "num_local_experts" if family == "mixtral" else "num_experts"
        fields |= {count: config.num_experts, "num_experts_per_tok": config.experts_per_token}
    if family == "phi3" and "original_max_position_embeddings" in rope:
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if family in GEMMA:
        fields |= {
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.final_softcap,
        }
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": config.rope_local_theta}
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    hf = transformers.AutoConfig.for_model(family, **fields)
    # A setting that the family has no field for would be lost without a word.
    plain = {name: getattr(ModelConfig, name) for name in NOT_EXPORTED}
    returned = override(config_from_hf(hf), **plain)
    expected = override(config, **plain)
    for name in (f for f in vars(expected) if f != "window_pattern"):
        given, kept = getattr(expected, name), getattr(returned, name)
        if given != kept and not (isinstance(given, float) and np.isclose(given, kept)):
            raise ValueError(f"family {family!r} cannot express {name}={given!r} (it has {kept!r})")
    if expected.layer_kinds != returned.layer_kinds:
        raise ValueError(f"family {family!r} cannot express layer kinds {expected.layer_kinds}")
    return hf


NOT_EXPORTED = (
    "value_head",
    "mtp_heads",
    "mtp_detach",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "dtype",
    "param_dtype",
    "remat",
    "scan_unroll",
)
"""Fields that are this project's own: heads, adapters, numerics and memory."""


def tensor_names(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Where each parameter of the trunk and vocabulary head lives in the family's files.

    Returns:
      {our path: (tensor name with {layer} and {expert} to fill in, first row)}; the row is not 0
      where a family stores several of our matrices in one tensor.
    """
    attention, block = "layers/block/attention/", "layers/block/"
    theirs = "model.layers.{layer}."
    names = {
        "embed/embedding": ("model.embed_tokens.weight", 0),
        "norm/scale": ("model.norm.weight", 0),
        "head/kernel": ("lm_head.weight", 0),
        block + "attention_norm/scale": (theirs + "input_layernorm.weight", 0),
        block + "mlp_norm/scale": (theirs + "post_attention_layernorm.weight", 0),
    }
    for ours in ("q", "k", "v", "o"):
        for leaf, suffix in (("kernel", "weight"), ("bias", "bias")):
            names[f"{attention}{ours}/{leaf}"] = (f"{theirs}self_attn.{ours}_proj.{suffix}", 0)
    for ours in ("q_norm", "k_norm"):
        names[f"{attention}{ours}/scale"] = (f"{theirs}self_attn.{ours}.weight", 0)
    for ours in ("gate", "up", "down"):
        names[f"{block}mlp/{ours}/kernel"] = (f"{theirs}mlp.{ours}_proj.weight", 0)
    if config.family in GEMMA:
        names |= {
            block + "attention_post_norm/scale": (theirs + "post_attention_layernorm.weight", 0),
            block + "mlp_norm/scale": (theirs + "pre_feedforward_layernorm.weight", 0),
            block + "mlp_post_norm/scale": (theirs + "post_feedforward_layernorm.weight", 0),
        }
    if config.family in EXPERTS:
        mixtral = config.family == "mixtral"
        room = theirs + ("block_sparse_moe." if mixtral else "mlp.")
        names[block + "moe/router/kernel"] = (room + "gate.weight", 0)
        for ours, short in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            name = short if mixtral else f"{ours}_proj"
            names[f"{block}moe/{ours}"] = (room + "experts.{expert}." + name + ".weight", 0)
    if config.family == "phi3":
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv, gate_up = theirs + "self_attn.qkv_proj.weight", theirs + "mlp.gate_up_proj.weight"
        names |= {
            attention + "q/kernel": (qkv, 0),
            attention + "k/kernel": (qkv, queries),
            attention + "v/kernel": (qkv, queries + keys),
            block + "mlp/gate/kernel": (gate_up, 0),
            block + "mlp/up/kernel": (gate_up, config.mlp_size),
        }
    return names


def _pieces(name: str, shape):
    """Yields (leading index, tensor name) of each file tensor in a stacked parameter."""
    stacked = (("{layer}" in name) + ("{expert}" in name)) * (0,)
    for lead in np.ndindex(*shape[: len(stacked)]):
        yield lead, name.format(**dict(zip(("layer", "expert"), lead)))


def _transposed(path: str) -> bool:
    return path.endswith("kernel") or "/moe/" in path


def _open(path: pathlib.Path, stack: contextlib.ExitStack) -> dict:
    """Returns {tensor name: lazy slice}: of the index's files, of model.safetensors, or of all."""
    if (path / INDEX_FILE).is_file():
        weights = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        files = [path / name for name in sorted(set(weights.values()))]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = [file for file in path.glob("*.safetensors") if file.name != EXTRA_FILE]
    if not files:
        found = ", ".join(sorted(file.name for file in path.iterdir()))
        raise FileNotFoundError(f"no *.safetensors in {path}, which holds {found}")
    handles = [stack.enter_context(safe_open(file, "np")) for file in files]
    return {name: handle.get_slice(name) for handle in handles for name in handle.keys()}


def _check(files: dict, config: ModelConfig, shapes: dict, names: dict, path):
    """Raises one error that lists every tensor that is missing, misshaped or unexpected."""
    expected = {}
    for ours, shape in shapes.items():
        name, row = names[ours]
        for lead, tensor in _pieces(name, shape):
            size = shape[len(lead) :]
            size = size[::-1] if _transposed(ours) else size
            rows = row + size[0]
            expected[tensor] = (max(rows, expected.get(tensor, (0,))[0]), *size[1:])
    found = {name: tuple(part.get_shape()) for name, part in files.items()}
    problems = [f"missing {name} {size}" for name, size in expected.items() if name not in found]
    problems += [
        f"{name} is {found[name]}, expected {size}"
        for name, size in expected.items()
        if name in found and found[name] != size
    ]
    ignored = ("rotary_emb.inv_freq",) + (("lm_head.weight",) if config.tie_embeddings else ())
    problems += [
        f"unexpected {name} {found[name]}"
        for name in found
        if name not in expected and not name.endswith(ignored)
    ]
    if problems:
        raise ValueError(
            f"{path} does not hold a {config.family} model of this configuration:\n  "
            + "\n  ".join(problems)
        )


def _reader(files: dict, path: str, name: str, row: int, shape, dtype) -> Callable:
    """Returns a function from an index of the stacked parameter to that part of it, from disk."""

    def read(index):
        ranges = [range(*part.indices(size)) for part, size in zip(index, shape)]
        out = np.empty([len(r) for r in ranges], dtype)
        for lead, tensor in _pieces(name, shape):
            if not all(i in r for i, r in zip(lead, ranges)):
                continue
            rest = [slice(r.start, r.stop) for r in ranges[len(lead) :]]
            rest = rest[::-1] if _transposed(path) else rest
            rest[0] = slice(rest[0].start + row, rest[0].stop + row)
            part = files[tensor][tuple(rest)]
            place = tuple(i - r.start for i, r in zip(lead, ranges))
            out[place] = part.T if _transposed(path) else part
        return out

    return read


def load_hf(path, dtype="float32", mesh=None, key=None, **overrides) -> tuple[ModelConfig, dict]:
    """Loads a Hugging Face directory: config.json and safetensors, in one file or in shards.

    Tensors stream from disk one at a time, each device reading only its own part, so the host
    holds little more than the parameters that live on it.

    Args:
      path: directory.
      dtype: to compute and to store parameters in; `param_dtype=...` stores in another.
      mesh: device mesh to place parameters on by the sharding rules; None is the default device.
      key: jax.random key of the leaves that no file has (adapters, value and multi-token heads
        asked for in `overrides`); key 0 by default.
      **overrides: ModelConfig fields to replace, e.g. lora_rank=16, value_head=True, remat=True.

    Returns:
      (config, params).

    Raises:
      FileNotFoundError: no config.json or no safetensors.
      ValueError: an unsupported family or RoPE type, or tensors that are missing, misshaped or
        unexpected, all listed.
    """
    path = pathlib.Path(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {path}")
    settings = json.loads((path / "config.json").read_text())
    # Before transformers reads it: it fails less clearly on what it does not know.
    if settings.get("model_type") not in FAMILIES:
        raise ValueError(unknown_name("model family", settings.get("model_type"), tuple(FAMILIES)))
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "su", *ROPE_TYPES):
        raise ValueError(unknown_name("RoPE type", kind, ("default", *ROPE_TYPES)))
    config = config_from_hf(transformers.AutoConfig.from_pretrained(path, local_files_only=True))
    config = override(config, **{"dtype": dtype, "param_dtype": dtype, **overrides})

    key = jax.random.key(0) if key is None else key
    shapes = flatten(jax.eval_shape(lambda k: init(config, k), key))
    names = tensor_names(config)
    shapes, extra = (
        {ours: leaf for ours, leaf in shapes.items() if (ours in names) == stored}
        for stored in (True, False)
    )

    def sharding(ours, shape):
        if mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(mesh, leaf_spec(ours, shape, mesh))

    leaves = {}
    with contextlib.ExitStack() as stack:
        files = _open(path, stack)
        _check(files, config, {ours: leaf.shape for ours, leaf in shapes.items()}, names, path)
        for ours, leaf in shapes.items():
            read = _reader(files, ours, *names[ours], leaf.shape, leaf.dtype)
            leaves[ours] = jax.make_array_from_callback(
                leaf.shape, sharding(ours, leaf.shape), read
            )
    if extra:
        stored = {}
        if (path / EXTRA_FILE).is_file():
            stored = safetensors_numpy.load_file(path / EXTRA_FILE)
        # Compiled for these leaves alone, so the trunk is never initialised.
        fresh = jax.jit(lambda k: {o: flatten(init(config, k))[o] for o in extra})(key)
        for ours, leaf in extra.items():
            value = stored.get(ours, fresh[ours])
            if value.shape != leaf.shape:
                raise ValueError(
                    f"{path / EXTRA_FILE}: {ours} is {value.shape}, expected {leaf.shape}"
                )
            leaves[ours] = jax.device_put(value.astype(leaf.dtype), sharding(ours, leaf.shape))
    return config, unflatten(leaves)


def save_hf(path, config: ModelConfig, params, tokenizer=None):
    """Writes a directory that `transformers` and `load_hf` read; adapters are merged.

    Tensors are gathered and written in shards of at most about 2 GB. Value and multi-token heads,
    which the families' own files have no place for, go to extra_heads.safetensors.

    Args:
      path: directory, created if missing.
      config: the model.
      params: its parameters.
      tokenizer: whose special token ids go into config.json, and whose stop_ids end a generation
        by generation_config.json; None leaves them out.

    Raises:
      ValueError: a configuration that its family cannot express.
    """
    path = pathlib.Path(path)
    hf = config_to_hf(config)
    hf.architectures = [FAMILIES[config.family]]
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in SPECIAL}
        for name, value in special.items():
            setattr(hf, name, value)
        special["eos_token_id"] = list(tokenizer.stop_ids)
        (path / "generation_config.json").write_text(json.dumps(special, indent=2))
    hf.save_pretrained(path)

    leaves = flatten(merge(params, config))
    names = tensor_names(config)
    sources = {}  # Tensor name -> [(path, leading index)], in row order.
    for ours, (name, _) in sorted(names.items(), key=lambda item: item[1][1]):
        if ours in leaves:
            for lead, tensor in _pieces(name, leaves[ours].shape):
                sources.setdefault(tensor, []).append((ours, lead))

    def gather(tensor):
        parts = (np.asarray(leaves[ours][lead]) for ours, lead in sources[tensor])
        parts = [part.T if _transposed(o) else part for part, (o, _) in zip(parts, sources[tensor])]
        return np.ascontiguousarray(np.concatenate(parts))

    def size(tensor):
        return sum(
            leaves[o].nbytes // int(np.prod(leaves[o].shape[: len(i)])) for o, i in sources[tensor]
        )

    shards, used = [[]], 0
    for tensor in sources:
        if used and used + size(tensor) > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size(tensor)
    # What an earlier, differently sharded model left here would be read in this one's place.
    for stale in (*path.glob("model*.safetensors"), path / INDEX_FILE, path / EXTRA_FILE):
        stale.unlink(missing_ok=True)
    index = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        safetensors_numpy.save_file({t: gather(t) for t in shard}, path / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = {"total_size": sum(map(size, sources))}
        text = json.dumps({"metadata": total, "weight_map": index}, indent=2)
        (path / INDEX_FILE).write_text(text)
    extra = {ours: np.asarray(leaf) for ours, leaf in leaves.items() if ours not in names}
    if extra:
        safetensors_numpy.save_file(extra, path / EXTRA_FILE)
