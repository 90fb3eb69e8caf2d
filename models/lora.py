"""Low-rank adapters: splitting off what trains, merging, and the PEFT file layout.

The adapter leaves `lora_a` [in, r] and `lora_b` [r, out] stand beside their kernel:
W' = W + (alpha / r) A B (Hu et al., 2021, arXiv:2106.09685).
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

from models.config import ModelConfig, override, unknown_name
from models.tree import flatten, unflatten

ADAPTERS = ("lora_a", "lora_b")


def partition(params) -> tuple[dict, dict]:
    """Splits parameters into what trains and what stays frozen.

    Adapters train, and so do the value and multi-token heads, which start from nothing; all else
    is frozen. Without adapters everything trains.

    Args:
      params: the model's parameters.

    Returns:
      (trainable, frozen), two trees that `combine` joins.
    """
    leaves = flatten(params)
    adapted = any(path.endswith(ADAPTERS) for path in leaves)

    def trains(path):
        return not adapted or path.endswith(ADAPTERS) or path.startswith(("value_head", "mtp_"))

    return (
        unflatten({path: leaf for path, leaf in leaves.items() if trains(path)}),
        unflatten({path: leaf for path, leaf in leaves.items() if not trains(path)}),
    )


def combine(trainable, frozen) -> dict:
    """Returns the parameters whose `partition` is (trainable, frozen)."""
    return unflatten({**flatten(frozen), **flatten(trainable)})


def merge(params, config: ModelConfig) -> dict:
    """Folds every adapter into its kernel, W + (alpha / r) A B, and drops it.

    The result belongs to `override(config, lora_rank=0)`.

    Args:
      params: parameters, with or without adapters.
      config: their configuration.
    """
    leaves = flatten(params)
    for path in [path for path in leaves if path.endswith("lora_a")]:
        owner = path.removesuffix("lora_a")
        kernel = leaves[owner + "kernel"]
        a, b = (leaves.pop(owner + name).astype(jnp.float32) for name in ADAPTERS)
        change = (config.lora_alpha / config.lora_rank) * (a @ b)
        leaves[owner + "kernel"] = (kernel.astype(jnp.float32) + change).astype(kernel.dtype)
    return unflatten(leaves)


# PEFT names an adapter after the module it stands beside.
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_ROOM = {target: "attention" if target in "qkvo" else "mlp" for target in _MODULES}


def _peft_name(layer: int, target: str, matrix: str) -> str:
    return f"base_model.model.model.layers.{layer}.{_MODULES[target]}.lora_{matrix}.weight"


def _require_separate_projections(config: ModelConfig):
    if config.family == "phi3":
        raise ValueError(
            "the PEFT layout of family 'phi3' adapts fused projections (qkv_proj, gate_up_proj); "
            "expected a family with separate ones: merge the adapters and save_hf instead"
        )


def save_peft(path, config: ModelConfig, params):
    """Writes the trunk's adapters as PEFT does: adapter_config.json, adapter_model.safetensors.

    Args:
      path: directory, created if missing.
      config: the model, with lora_rank > 0.
      params: its parameters.

    Raises:
      ValueError: a model without adapters, or with fused projections (Phi-3).
    """
    if not config.lora_rank:
        raise ValueError("save_peft needs a model with adapters, got lora_rank=0")
    _require_separate_projections(config)
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for target in config.lora_targets:
        adapter = params["layers"]["block"][_ROOM[target]][target]
        for leaf, matrix in zip(ADAPTERS, "AB"):
            for layer, value in enumerate(np.asarray(adapter[leaf])):
                tensors[_peft_name(layer, target, matrix)] = np.ascontiguousarray(value.T)
    safetensors_numpy.save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [_MODULES[target].split(".")[1] for target in config.lora_targets],
    }
    (path / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def load_peft(path, config: ModelConfig, params) -> tuple[ModelConfig, dict]:
    """Adds the adapters of a PEFT directory to a model.

    Args:
      path: directory with adapter_config.json and adapter_model.safetensors.
      config: the base model, without adapters.
      params: its parameters.

    Returns:
      The configuration and parameters with the adapters in place.

    Raises:
      ValueError: an adapter that this transformer cannot carry, or tensors that are missing or
        misshaped; the message names them.
    """
    _require_separate_projections(config)
    path = pathlib.Path(path)
    settings = json.loads((path / "adapter_config.json").read_text())
    modules = {name.split(".")[1]: target for target, name in _MODULES.items()}
    unusual = [name for name in ("use_dora", "use_rslora", "rank_pattern") if settings.get(name)]
    if settings.get("peft_type") != "LORA" or unusual or settings.get("bias", "none") != "none":
        raise ValueError(
            f"expected a plain LORA adapter without biases, got "
            f"peft_type={settings.get('peft_type')!r}, bias={settings.get('bias')!r}, {unusual}"
        )
    for name in settings["target_modules"]:
        if name not in modules:
            raise ValueError(unknown_name("target module", name, tuple(modules)))
    config = override(
        config,
        lora_rank=settings["r"],
        lora_alpha=float(settings["lora_alpha"]),
        lora_targets=tuple(t for m, t in modules.items() if m in settings["target_modules"]),
    )
    tensors = safetensors_numpy.load_file(path / "adapter_model.safetensors")
    dtype = jnp.dtype(config.param_dtype)
    leaves, problems = flatten(params), []
    for target in config.lora_targets:
        owner = f"layers/block/{_ROOM[target]}/{target}"
        inputs, outputs = leaves[f"{owner}/kernel"].shape[1:]
        shapes = ((inputs, config.lora_rank), (config.lora_rank, outputs))
        for leaf, matrix, shape in zip(ADAPTERS, "AB", shapes):
            layers = []
            for layer in range(config.num_layers):
                name = _peft_name(layer, target, matrix)
                if name not in tensors:
                    problems.append(f"missing {name}")
                elif tensors[name].shape != shape[::-1]:
                    problems.append(f"{name} is {tensors[name].shape}, expected {shape[::-1]}")
                else:
                    layers.append(tensors[name].T)
            if len(layers) == config.num_layers:
                leaves[f"{owner}/{leaf}"] = jax.device_put(np.stack(layers).astype(dtype))
    if problems:
        raise ValueError(f"adapter in {path} does not fit: " + "; ".join(problems))
    return config, unflatten(leaves)
