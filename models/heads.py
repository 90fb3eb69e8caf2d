"""The heads on the trunk's final hidden states: vocabulary and value."""

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.layers import INIT_SCALE


def init_heads(config: ModelConfig, key) -> dict:
    """Returns the parameters of the heads the config has; the value head starts at zero."""
    dtype = jnp.dtype(config.param_dtype)
    heads = {}
    if not config.tie_embeddings:
        shape = (config.hidden_size, config.vocab_size)
        heads["head"] = {"kernel": INIT_SCALE * jax.random.normal(key, shape, dtype)}
    if config.value_head:
        heads["value_head"] = {
            "kernel": jnp.zeros((config.hidden_size,), dtype),
            "bias": jnp.zeros((), dtype),
        }
    return heads


def logits(params, config: ModelConfig, hidden):
    """Next-token logits: cap(h W), W the embedding's transpose where they are tied.

    Args:
      params: the model's parameters.
      config: their configuration.
      hidden: [..., D] final hidden states.

    Returns:
      [..., V] in config.wide_dtype, accumulated in it: float32 for bfloat16 too.
    """
    if config.tie_embeddings:
        kernel, pattern = params["embed"]["embedding"], "...d,vd->...v"
    else:
        kernel, pattern = params["head"]["kernel"], "...d,dv->...v"
    scores = jnp.einsum(
        pattern,
        hidden.astype(config.dtype),
        kernel.astype(config.dtype),
        preferred_element_type=config.wide_dtype,
    )
    if config.final_softcap is not None:
        scores = config.final_softcap * jnp.tanh(scores / config.final_softcap)
    return scores


def values(params, config: ModelConfig, hidden):
    """State values: h w + b.

    Args:
      params: the model's parameters, with a value head.
      config: their configuration.
      hidden: [..., D] final hidden states.

    Returns:
      [...] in config.wide_dtype.

    Raises:
      ValueError: the model has no value head.
    """
    if "value_head" not in params:
        raise ValueError(
            f"the model has no value head: expected params['value_head'], got {sorted(params)}; "
            f"set value_head=True in its {type(config).__name__}"
        )
    head = jax.tree.map(lambda leaf: leaf.astype(config.wide_dtype), params["value_head"])
    return hidden.astype(config.wide_dtype) @ head["kernel"] + head["bias"]
