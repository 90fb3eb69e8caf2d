"""Incremental decoding equals the full forward pass, whatever the batch looks like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import init_cache, override, preset, repeat_cache
from tests.models.small import enlarged, run

CONFIG = preset("nano", num_layers=3, sliding_window=4, window_pattern=(True, False))
TOKENS = jax.random.randint(jax.random.key(1), (3, 12), 0, 128)
POSITIONS = jnp.maximum(jnp.arange(12) - jnp.array([0, 2, 4])[:, None], -1)
LIVE = np.asarray(POSITIONS >= 0)


def apply(config, params, tokens, positions, cache=None, **kwargs):
    return run(config, params, tokens, positions, cache=cache, **kwargs)


@pytest.mark.parametrize("widths", [(6, 1, 1, 1, 1, 1, 1), (5, 4, 3), (12,)])
def test_any_split_into_calls_gives_the_full_pass(widths):
    params = enlarged(CONFIG)
    full = apply(CONFIG, params, TOKENS, POSITIONS, capture=("attention_entropy:1",))
    cache, start, parts = init_cache(CONFIG, 3, 15), 0, []
    for width in widths:
        part = slice(start, start + width)
        out = apply(
            CONFIG,
            params,
            TOKENS[:, part],
            POSITIONS[:, part],
            cache,
            capture=("attention_entropy:1",),
        )
        cache, start = out.cache, start + width
        parts.append(out)
    hidden = jnp.concatenate([out.hidden for out in parts], axis=1)
    np.testing.assert_allclose(hidden[LIVE], full.hidden[LIVE], atol=1e-4)
    entropy = jnp.concatenate([out.captured["attention_entropy:1"] for out in parts], axis=1)
    np.testing.assert_allclose(entropy[LIVE], full.captured["attention_entropy:1"][LIVE], atol=1e-5)
    assert int(cache.index) == 12
    np.testing.assert_array_equal(cache.positions[:, :12], POSITIONS)
    np.testing.assert_array_equal(cache.positions[:, 12:], -1)


def test_finished_rows_stay_out_of_sight():
    # A row that has stopped is fed padding at position -1; the others must not notice.
    params = enlarged(CONFIG)
    start = apply(CONFIG, params, TOKENS[:, :6], POSITIONS[:, :6], init_cache(CONFIG, 3, 8))
    live = apply(CONFIG, params, TOKENS[:, 6:7], POSITIONS[:, 6:7], start.cache)
    stopped = apply(
        CONFIG, params, TOKENS[:, 6:7].at[1].set(0), POSITIONS[:, 6:7].at[1].set(-1), start.cache
    )
    np.testing.assert_array_equal(stopped.hidden[::2], live.hidden[::2])
    assert np.isfinite(stopped.hidden).all()


def test_repeat_gives_each_row_of_a_group_its_prompt():
    params = enlarged(CONFIG)
    start = apply(CONFIG, params, TOKENS[:, :6], POSITIONS[:, :6], init_cache(CONFIG, 3, 8))
    once = apply(CONFIG, params, TOKENS[:, 6:7], POSITIONS[:, 6:7], start.cache).hidden
    twice = apply(
        CONFIG,
        params,
        jnp.repeat(TOKENS[:, 6:7], 2, axis=0),
        jnp.repeat(POSITIONS[:, 6:7], 2, axis=0),
        repeat_cache(start.cache, 2),
    ).hidden
    np.testing.assert_allclose(twice, jnp.repeat(once, 2, axis=0), atol=1e-6)


def test_cache_takes_the_compute_dtype():
    half = override(CONFIG, dtype="bfloat16")
    assert init_cache(half, 2, 5).keys.dtype == jnp.bfloat16
    assert init_cache(half, 2, 5, "float32").keys.dtype == jnp.float32
    assert init_cache(half, 2, 5).values.shape == (3, 2, 5, 1, 16)


def test_whole_batch_features_are_refused():
    params = enlarged(CONFIG)
    with pytest.raises(ValueError, match="need the whole batch, not a cache"):
        apply(CONFIG, params, TOKENS, POSITIONS, init_cache(CONFIG, 3, 12), segment_ids=POSITIONS)
