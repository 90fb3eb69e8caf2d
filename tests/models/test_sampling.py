"""Sampling against a plain sampler without cache, groups, stops, truncation, determinism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import heads, override, preset, scoring
from models.sampling import filter_logits, sample
from models.transformer import Transformer
from tests.models.small import enlarged, run

CONFIG = override(preset("nano"), vocab_size=19, num_layers=2)
PARAMS = enlarged(CONFIG)
N, P, G, T = 3, 5, 2, 6
PROMPTS = np.array(jax.random.randint(jax.random.key(1), (N, P), 1, 19))
PROMPT_POSITIONS = np.tile(np.arange(P), (N, 1)).astype(np.int32)
for _row, _padding in ((1, 2), (2, 4)):
    PROMPT_POSITIONS[_row] = np.maximum(PROMPT_POSITIONS[_row] - _padding, -1)
    PROMPTS[_row, :_padding] = 0
KEYS = jax.random.split(jax.random.key(2), N * G)
STOPS = (3, 7, 11)


def draw(
    config=CONFIG, params=PARAMS, prompts=PROMPTS, positions=PROMPT_POSITIONS, keys=KEYS, **kw
):
    settings = {"group_size": G, "max_new_tokens": T, "temperature": 1.0, **kw}
    return sample(config, params, prompts, positions, keys, **settings)


def whole(samples):
    """The batch that a scorer sees: tokens and positions [B, P+T]."""
    tokens = np.concatenate([np.repeat(PROMPTS, G, axis=0), samples.tokens], axis=1)
    after = np.where(
        np.asarray(samples.mask) > 0,
        np.repeat(PROMPT_POSITIONS[:, -1:], G, axis=0) + 1 + np.arange(T),
        -1,
    )
    return tokens, np.concatenate([np.repeat(PROMPT_POSITIONS, G, axis=0), after], axis=1)


def plain_sample(config, params, temperature, filters, stops):
    """Token by token, one response at a time, the whole text read anew for each token."""
    tokens, logprobs = np.zeros((N * G, T), int), np.zeros((N * G, T))
    for b in range(N * G):
        text = [int(i) for i in PROMPTS[b // G][PROMPT_POSITIONS[b // G] >= 0]]
        read = len(text)
        for t in range(T):
            padded = np.array([text + [0] * (P + T - len(text))])
            positions = np.where(np.arange(P + T) < len(text), np.arange(P + T), -1)[None]
            hidden = run(config, params, padded, positions.astype(np.int32)).hidden[
                0, len(text) - 1
            ]
            logits = heads.logits(params, config, hidden)
            if temperature:
                logits = filter_logits(logits, temperature, **filters)
                noise = jax.random.gumbel(jax.random.fold_in(KEYS[b], t), logits.shape)
            else:
                noise = 0.0
            token = int(jnp.argmax(logits + noise))
            tokens[b, t], logprobs[b, t] = token, jax.nn.log_softmax(logits)[token]
            text.append(token)
            if token in stops:
                break
        assert len(text) > read
    return tokens, logprobs


@pytest.mark.parametrize(
    "temperature, filters",
    [
        (1.0, {}),
        (0.0, {}),
        (0.7, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}),
    ],
)
def test_equals_a_sampler_without_cache(temperature, filters):
    samples = draw(temperature=temperature, stop_tokens=STOPS, **filters)
    tokens, logprobs = plain_sample(CONFIG, PARAMS, temperature, filters, STOPS)
    np.testing.assert_array_equal(samples.tokens, tokens)
    np.testing.assert_allclose(samples.logprobs, logprobs, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_log_probabilities_are_the_scorers(window):
    config = override(CONFIG, sliding_window=window)
    samples = draw(config, temperature=0.8, stop_tokens=STOPS)
    tokens, positions = whole(samples)
    scored = scoring.score(
        config, PARAMS, tokens, positions, P, {"logprobs": scoring.log_prob}, temperature=0.8
    )
    mask = np.asarray(samples.mask)
    assert 0 < mask.sum() < mask.size
    np.testing.assert_allclose(samples.logprobs, mask * scored["logprobs"], atol=1e-5)


def test_mask_ends_with_the_stop_token():
    samples = jax.tree.map(np.asarray, draw(stop_tokens=STOPS, pad_id=18))
    for tokens, mask, truncated in zip(samples.tokens, samples.mask, samples.truncated):
        stopped = np.flatnonzero(np.isin(tokens, STOPS))
        length = stopped[0] + 1 if len(stopped) else T
        assert truncated == (len(stopped) == 0)
        np.testing.assert_array_equal(mask, np.arange(T) < length)
        np.testing.assert_array_equal(tokens[length:], 18)
    assert samples.truncated.any() and not samples.truncated.all()
    endless = draw(stop_tokens=())
    assert endless.truncated.all() and endless.mask.all()
    # Until its stop token, a row is what it would have been without one.
    live = samples.mask > 0
    np.testing.assert_array_equal(samples.tokens[live], np.asarray(endless.tokens)[live])


def test_a_response_depends_on_its_key_not_on_the_batch():
    samples = draw(stop_tokens=STOPS)
    order = np.array([2, 0, 1])
    moved = draw(
        prompts=PROMPTS[order],
        positions=PROMPT_POSITIONS[order],
        keys=KEYS.reshape(N, G)[order].ravel(),
        stop_tokens=STOPS,
    )
    rows = np.arange(N * G).reshape(N, G)[order].ravel()
    np.testing.assert_array_equal(moved.tokens, samples.tokens[rows])
    alone = draw(
        prompts=PROMPTS[1:2],
        positions=PROMPT_POSITIONS[1:2],
        keys=KEYS[3:4],
        group_size=1,
        stop_tokens=STOPS,
    )
    np.testing.assert_array_equal(alone.tokens[0], samples.tokens[3])
    longer = draw(max_new_tokens=T + 2, stop_tokens=STOPS)
    np.testing.assert_array_equal(longer.tokens[:, :T], samples.tokens)
    # More padding on the left changes nothing either.
    wider = draw(
        prompts=np.pad(PROMPTS, ((0, 0), (3, 0))),
        positions=np.pad(PROMPT_POSITIONS, ((0, 0), (3, 0)), constant_values=-1),
        stop_tokens=STOPS,
    )
    np.testing.assert_array_equal(wider.tokens, samples.tokens)
    np.testing.assert_allclose(wider.logprobs, samples.logprobs, atol=1e-5)


def test_first_tokens_follow_the_policy():
    count = 4000
    samples = draw(
        prompts=PROMPTS[:1],
        positions=PROMPT_POSITIONS[:1],
        keys=jax.random.split(jax.random.key(9), count),
        group_size=count,
        max_new_tokens=1,
        temperature=1.5,
    )
    hidden = run(CONFIG, PARAMS, PROMPTS[:1], PROMPT_POSITIONS[:1]).hidden[0, -1]
    p = np.asarray(jax.nn.softmax(heads.logits(PARAMS, CONFIG, hidden) / 1.5))
    found = np.bincount(samples.tokens[:, 0], minlength=19) / count
    # Five standard errors of each frequency.
    assert (np.abs(found - p) < 5 * np.sqrt(p * (1 - p) / count) + 1 / count).all()


def test_one_prefill_and_no_step_after_the_last_stop(monkeypatch):
    calls = []
    network = Transformer.__call__

    def counted(self, tokens, *args, **kwargs):
        jax.debug.callback(lambda: calls.append(tokens.shape))
        return network(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Transformer, "__call__", counted)
    config = override(CONFIG, max_length=99)  # Compiled anew, with the counter in it.
    samples = draw(config, stop_tokens=STOPS, max_new_tokens=T + 20)
    jax.effects_barrier()
    longest = int(np.asarray(samples.mask).sum(1).max())
    assert longest < T + 20
    assert sorted(calls) == sorted([(N, P)] + [(N * G, 1)] * (longest - 1))


def test_new_values_do_not_recompile():
    draw(stop_tokens=STOPS)
    compiled = sample._cache_size()
    other = enlarged(CONFIG, seed=4)
    draw(params=other, prompts=PROMPTS[::-1].copy(), keys=KEYS[::-1], stop_tokens=STOPS)
    assert sample._cache_size() == compiled


def test_filters_keep_what_they_say():
    p = np.array([0.5, 0.05, 0.25, 0.15, 0.05])
    logits = jnp.log(jnp.asarray(p))[None] + 3.0

    def kept(**filters):
        out = filter_logits(logits, 1.0, **filters)[0]
        alive = np.isfinite(out)
        np.testing.assert_allclose(out[alive], logits[0][alive])
        return set(np.flatnonzero(alive))

    assert kept() == {0, 1, 2, 3, 4}
    assert kept(top_k=1) == {0}
    assert kept(top_k=3) == {0, 2, 3}
    assert kept(top_k=4) == {0, 1, 2, 3, 4}  # The fourth and the fifth tie.
    assert kept(top_p=0.49) == {0}
    assert kept(top_p=0.51) == {0, 2}
    assert kept(top_p=0.8) == {0, 2, 3}
    assert kept(top_p=1e-9) == {0}
    assert kept(min_p=0.4) == {0, 2}
    assert kept(min_p=1.0) == {0}
    # Of the two likeliest, the first has two thirds: the nucleus is of what top_k left.
    assert kept(top_k=2, top_p=0.6) == {0}
    assert kept(top_k=2, top_p=0.7) == {0, 2}
    # Tempering comes first: squared, the first has 0.73.
    assert np.isfinite(filter_logits(logits, 0.5, top_p=0.7)[0]).sum() == 1


def test_half_precision_reports_float32():
    half = override(CONFIG, dtype="bfloat16")
    samples = draw(half, stop_tokens=STOPS)
    assert samples.logprobs.dtype == samples.mask.dtype == jnp.float32
    assert np.isfinite(samples.logprobs).all()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -1.0}, "temperature must be at least 0 and finite, got -1.0"),
        ({"top_k": 20}, r"top_k must lie in 0..19 \(0 is off\), got 20"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\]"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (
            {"group_size": 3},
            r"expected 9 typed keys .* 3 responses to 3 prompts, got key<fry> \(6,",
        ),
        ({"keys": np.zeros((6, 2), np.uint32)}, r"typed keys .* got uint32 \(6, 2\)"),
        ({"stop_tokens": (2, 19)}, r"stop_tokens \[19\] are not in the vocabulary of 19"),
        ({"positions": PROMPT_POSITIONS[:2]}, r"expected both \[N, P\], got \(3, 5\) and \(2, 5\)"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        draw(**settings)
