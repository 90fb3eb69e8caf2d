"""The key-value cache of incremental decoding: a pytree whose columns are the batch's columns."""

import flax.struct
import jax
import jax.numpy as jnp

from models.config import ModelConfig


@flax.struct.dataclass
class Cache:
    """Keys and values of the columns seen so far.

    Args:
      keys, values: [L, B, S, K, H] of L layers, K key-value heads of size H.
      positions: [B, S] int32; -1 on padding and on columns not yet written.
      index: scalar int32, the column the next token is written to.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    index: jax.Array


def init_cache(config: ModelConfig, batch: int, length: int, dtype=None) -> Cache:
    """Returns an empty cache of `length` columns for `batch` rows, in the compute dtype or `dtype`.

    Size: 2 L B S K H numbers.
    """
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    dtype = jnp.dtype(dtype or config.dtype)
    return Cache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        positions=jnp.full((batch, length), -1, jnp.int32),
        index=jnp.zeros((), jnp.int32),
    )


def repeat_cache(cache: Cache, times: int) -> Cache:
    """Returns the cache with each row repeated `times` times in place: a group shares its prefill.

    Args:
      cache: of B rows.
      times: rows that each row becomes, contiguous.
    """
    return cache.replace(
        keys=jnp.repeat(cache.keys, times, axis=1),
        values=jnp.repeat(cache.values, times, axis=1),
        positions=jnp.repeat(cache.positions, times, axis=0),
    )
