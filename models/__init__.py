"""The transformer: configuration, network, cache, adapters, checkpoints, sharding."""

from models.cache import Cache, init_cache, repeat_cache
from models.config import PRESETS, ModelConfig, override, preset
from models.heads import logits, values
from models.transformer import Output, Transformer, init

__all__ = [
    "PRESETS",
    "Cache",
    "ModelConfig",
    "Output",
    "Transformer",
    "init",
    "init_cache",
    "logits",
    "override",
    "preset",
    "repeat_cache",
    "values",
]
