"""The transformer's configuration: one flat dataclass for every family, and named presets."""

import dataclasses
import difflib
from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
ATTENTION_TARGETS = ("q", "k", "v", "o")
MLP_TARGETS = ("gate", "up", "down")
ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a decoder-only transformer; hashable, so jit takes it as static.

    Sizes are counts; `dtype` is what the network computes in, `param_dtype` what it stores.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    family: str = "llama"  # The Hugging Face model type that save_hf writes.
    activation: str = "silu"
    norm_eps: float = 1e-6
    norm_offset: bool = False  # Norms scale by 1 + w (Gemma) instead of w.
    post_norms: bool = False  # Norms after attention and MLP too (Gemma 2 and 3).
    embed_scale: float = 1.0  # Multiplies the token embeddings (Gemma: sqrt(hidden_size)).
    tie_embeddings: bool = True
    # Attention.
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None  # None: head_dim ** -0.5.
    attention_softcap: float | None = None
    final_softcap: float | None = None
    sliding_window: int | None = None  # Positions a windowed layer sees, itself included.
    window_pattern: tuple[bool, ...] = (True,)  # Cycled over layers: does the layer use the window?
    # Rotary position embedding.
    rope_theta: float = 10000.0
    rope_local_theta: float | None = None  # Of the windowed layers, where it differs (Gemma 3).
    rope_scaling: tuple[tuple[str, object], ...] | None = None  # ("rope_type", ...) and its fields.
    rotary_fraction: float = 1.0
    max_length: int = 2048
    # Mixture of experts; num_experts = 0 is a dense MLP.
    num_experts: int = 0
    experts_per_token: int = 2
    norm_topk: bool = True  # Rescale the chosen experts' weights to sum to one.
    expert_size: int = 0
    # Extra heads.
    value_head: bool = False
    mtp_heads: int = 0  # Depth of multi-token prediction.
    mtp_detach: bool = False  # Keep the MTP blocks' gradient out of the trunk.
    # Low-rank adapters; lora_rank = 0 is none.
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ATTENTION_TARGETS
    # Numerics and memory.
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False  # Recompute each layer in the backward pass.
    scan_unroll: int = 1  # Layers per iteration of the layer loop.

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} heads "
                f"and {self.num_kv_heads} key-value heads"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"head_dim * rotary_fraction must be even, got {self.head_dim} * "
                f"{self.rotary_fraction}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(unknown_name("activation", self.activation, ACTIVATIONS))
        if self.rope_type not in ("default", *ROPE_TYPES):
            raise ValueError(unknown_name("RoPE type", self.rope_type, ("default", *ROPE_TYPES)))
        # The experts' kernels carry no adapters.
        targets = ATTENTION_TARGETS if self.num_experts else ATTENTION_TARGETS + MLP_TARGETS
        for target in self.lora_targets if self.lora_rank else ():
            if target not in targets:
                raise ValueError(unknown_name("LoRA target", target, targets))
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token must lie in 1..num_experts, got {self.experts_per_token} "
                f"of {self.num_experts}"
            )

    @property
    def wide_dtype(self) -> str:
        """Type of norms, attention scores, logits and values: never narrower than float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def rotary_dim(self) -> int:
        """Leading features of each head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def rope_type(self) -> str:
        """How the rotary frequencies are scaled; "default" is not at all."""
        return dict(self.rope_scaling or ()).get("rope_type", "default")

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Per layer: 0 attends to the whole context, 1 through the sliding window."""
        if self.sliding_window is None:
            return (0,) * self.num_layers
        pattern = self.window_pattern
        return tuple(int(pattern[i % len(pattern)]) for i in range(self.num_layers))


def unknown_name(what: str, given: str, known) -> str:
    """The message of an error about a name: what was given, what is known, the nearest match."""
    close = difflib.get_close_matches(str(given), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {given!r}; expected one of {', '.join(map(str, known))}{hint}"


PRESETS = {
    "nano": ModelConfig(
        vocab_size=128,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_size=64,
        max_length=256,
    ),
    "tiny": ModelConfig(
        vocab_size=128,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_size=384,
        max_length=1024,
    ),
    "small": ModelConfig(
        vocab_size=128,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        mlp_size=768,
        max_length=2048,
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_size=1536,
        norm_eps=1e-5,
        rope_theta=100000.0,
        max_length=8192,
    ),
}


def override(config: ModelConfig, **fields) -> ModelConfig:
    """Returns `config` with `fields` replaced.

    Raises:
      ValueError: a field that ModelConfig does not have, with the nearest one.
    """
    known = [field.name for field in dataclasses.fields(ModelConfig)]
    for name in fields:
        if name not in known:
            raise ValueError(unknown_name("model field", name, known))
    return dataclasses.replace(config, **fields)


def preset(name: str, **fields) -> ModelConfig:
    """Returns the preset called `name` with `fields` replaced.

    Raises:
      ValueError: an unknown preset or field, with the nearest one.
    """
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, tuple(PRESETS)))
    return override(PRESETS[name], **fields)
