"""Rotary grouped-query attention: frequencies, visibility, and the layer with its cache."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.layers import Linear, RMSNorm

# Finite, so that a row that sees nothing gets a uniform, finite softmax instead of NaN.
MASKED = -1e30


def rope_frequencies(config: ModelConfig, length: int, local: bool = False):
    """Angular frequencies of the rotary embedding, theta^(-2i/R), scaled by the config's RoPE type.

    Frequencies are static: types that depend on the sequence's length ("dynamic", "longrope") take
    the number of columns of the batch or cache. So the sampler and the trainer, whose batches are
    equally wide, rotate alike.

    Args:
      config: model configuration; R = config.rotary_dim.
      length: columns of the batch or cache.
      local: of the windowed layers; rope_local_theta, where set, is never scaled.

    Returns:
      Frequencies [R/2] float32 in radians per position, and the factor on cosine and sine.

    References:
      Su et al., 2021 (arXiv:2104.09864); Peng et al., 2023, YaRN (arXiv:2309.00071);
      Ding et al., 2024, LongRoPE (arXiv:2402.13753); Llama Team, 2024 (arXiv:2407.21783).
    """
    scaling = dict(config.rope_scaling or ())
    theta, kind, dim = config.rope_theta, config.rope_type, config.rotary_dim
    if local and config.rope_local_theta is not None:
        theta, kind = config.rope_local_theta, "default"
    # float32 throughout, as the reference implementations do: the rounding of a frequency is
    # multiplied by the position.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    factor = scaling.get("factor") or 1.0
    if kind == "dynamic":
        stretch = factor * max(length, config.max_length) / config.max_length - (factor - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    frequencies = np.float32(1.0) / np.float32(theta) ** exponents
    if kind == "linear":
        return frequencies / np.float32(factor), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(config, frequencies, scaling)
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        name = "long_factor" if length > original else "short_factor"
        factor = scaling.get("factor") or config.max_length / original
        default = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
        attention_factor = scaling.get("attention_factor")
        return (
            frequencies / np.asarray(scaling[name], np.float32),
            default if attention_factor is None else attention_factor,
        )
    return frequencies, 1.0


def _llama3(frequencies, scaling):
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequencies * (keep + (1 - keep) / scaling["factor"])).astype(np.float32)


def _yarn(config, frequencies, scaling):
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_length / original
    dim = config.rotary_dim

    def feature(turns):
        """The feature that turns this many times within the original context."""
        numerator = dim * math.log(original / (turns * 2 * math.pi))
        return numerator / (2 * math.log(config.rope_theta))

    low, high = feature(scaling.get("beta_fast") or 32), feature(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2) - low) / ((high - low) or 0.001)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    frequencies = (frequencies * (keep + (1 - keep) / factor)).astype(np.float32)

    def magnitude(scale):
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        both = mscale and mscale_all
        attention_factor = magnitude(mscale) / magnitude(mscale_all) if both else magnitude(1.0)
    return frequencies, attention_factor


def rope_table(config: ModelConfig, positions, length: int, local: bool = False):
    """Returns cosine and sine, stacked: [2, B, S, R/2] float32, of the positions [B, S]."""
    frequencies, factor = rope_frequencies(config, length, local)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * factor


def rotate(x, table):
    """Rotates feature pairs (i, i + R/2) of the leading R features of each head.

    Args:
      x: [B, S, heads, H] queries or keys.
      table: [2, B, S, R/2] from `rope_table`.
    """
    cos, sin = table[:, :, :, None, :]
    half = cos.shape[-1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    first, second, rest = jnp.split(x.astype(wide), (half, 2 * half), axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def visibility(query_positions, key_positions, window: int | None = None, segment_ids=None):
    """Which keys each query sees: real, not later, in the window, and of the same segment.

    Args:
      query_positions: [B, Q] int32.
      key_positions: [B, S] int32, -1 on padding.
      window: positions seen, the query's own included; None is all.
      segment_ids: [B, S] int32 where Q = S holds packed sequences, or None; what has an id below 0
        is common to all of a row's sequences, whose positions go on from its own.

    Returns:
      [B, Q, S] bool.
    """
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen &= query - key < window
    if segment_ids is not None:
        of_key = segment_ids[:, None, :]
        seen &= (segment_ids[:, :, None] == of_key) | (of_key < 0)
    return seen


class Attention(nn.Module):
    """softmax(cap(scale q k^T) + mask) v, with K key-value heads each serving a group of heads."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, table, seen, memory=None, layer=0, index=0, measure=None):
        """Attends over this call's columns, or over the cache after writing them to it.

        Args:
          x: [B, Q, D] normed hidden states.
          table: [2, B, Q, R/2] rotary cosine and sine.
          seen: [B, Q, S] bool visibility.
          memory: None, or the cache's keys and values [L, B, S, K, H] of all layers.
          layer: this layer's index into the cache.
          index: column the first of the Q tokens is written to.
          measure: also return the "entropy" of the attention rows, or their "weights".

        Returns:
          Output [B, Q, D], the updated memory, and what `measure` asked for, a mean over heads:
          [B, Q] in nats, [B, Q, S], or None.
        """
        config = self.config
        heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim

        def project(name, count):
            y = Linear(config, count * size, bias=config.qkv_bias, name=name)(x)
            return y.reshape(*x.shape[:2], count, size)

        query, key, value = project("q", heads), project("k", groups), project("v", groups)
        if config.qk_norm:
            query = RMSNorm(config, name="q_norm")(query)
            key = RMSNorm(config, name="k_norm")(key)
        query, key = rotate(query, table), rotate(key, table)
        if memory is not None:
            # The whole stack is carried and written in place; scanning over it as per-layer
            # inputs and outputs would copy it at every decoding step.
            memory = tuple(
                jax.lax.dynamic_update_slice(
                    old, new[None].astype(old.dtype), (layer, 0, index, 0, 0)
                )
                for old, new in zip(memory, (key, value))
            )
            key, value = (
                jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False).astype(query.dtype)
                for stack in memory
            )
        query = query.reshape(*x.shape[:2], groups, heads // groups, size)
        scale = config.attention_scale or size**-0.5
        scores = scale * jnp.einsum(
            "bqkgh,bskh->bkgqs", query, key, preferred_element_type=config.wide_dtype
        )
        if config.attention_softcap is not None:
            scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
        log_weights = jax.nn.log_softmax(jnp.where(seen[:, None, None], scores, MASKED))
        weights = jnp.exp(log_weights)
        measured = None
        if measure == "entropy":
            # A masked key has weight exactly 0 and a finite logarithm, so 0 * log 0 = 0.
            measured = -jnp.mean(jnp.sum(weights * log_weights, axis=-1), axis=(1, 2))
        elif measure == "weights":
            measured = jnp.where(seen, jnp.mean(weights, axis=(1, 2)), 0.0)
        out = jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(value.dtype), value)
        out = out.reshape(*x.shape[:2], heads * size)
        out = Linear(config, config.hidden_size, config.o_bias, residual=True, name="o")(out)
        return out, memory, measured
