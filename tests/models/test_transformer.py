"""The transformer's own properties: visibility, captures, precision, remat, training signal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import init, logits, override, preset, values
from models.tree import flatten
from tests.models import small
from tests.models.small import enlarged

NANO = preset("nano", num_layers=3, num_kv_heads=2)
KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (3, 10), 0, 128)
PADS = jnp.array([0, 2, 4])
POSITIONS = jnp.maximum(jnp.arange(10) - PADS[:, None], -1)
LIVE = np.asarray(POSITIONS >= 0)


def run(config, params, tokens=TOKENS, positions=POSITIONS, **kwargs):
    return small.run(config, params, tokens, positions, **kwargs)


def test_padding_and_later_tokens_are_invisible():
    params = enlarged(NANO)
    hidden = run(NANO, params).hidden
    assert np.isfinite(hidden).all()
    junk = jnp.where(LIVE, TOKENS, 77)
    np.testing.assert_array_equal(run(NANO, params, junk).hidden[LIVE], hidden[LIVE])
    later = TOKENS.at[:, 7:].add(1) % 128
    changed = run(NANO, params, later).hidden
    np.testing.assert_array_equal(changed[:, :7][LIVE[:, :7]], hidden[:, :7][LIVE[:, :7]])
    assert (np.abs(changed - hidden)[:, 7:].max(axis=-1) > 1e-2).all()


def test_columns_do_not_matter_only_positions_do():
    params = enlarged(NANO)
    left = run(NANO, params).hidden[2, 4:]
    alone = run(NANO, params, TOKENS[2:, 4:], POSITIONS[2:, 4:]).hidden[0]
    np.testing.assert_allclose(left, alone, atol=1e-5)


def test_window_hides_what_is_further_back():
    config = override(NANO, num_layers=1, sliding_window=3)
    params = enlarged(config)
    hidden = run(config, params).hidden
    changed = run(config, params, TOKENS.at[0, 4].set(5)).hidden
    moved = np.abs(changed - hidden)[0].max(axis=-1) > 1e-6
    assert moved.tolist() == [False] * 4 + [True] * 3 + [False] * 3


def test_packed_segments_equal_separate_rows():
    params = enlarged(NANO)
    lengths = (4, 6)
    positions = jnp.concatenate([jnp.arange(n) for n in lengths])[None]
    segments = jnp.repeat(jnp.arange(2), jnp.array(lengths))[None]
    packed = run(NANO, params, TOKENS[:1], positions, segment_ids=segments).hidden[0]
    for part in (slice(0, 4), slice(4, 10)):
        alone = run(NANO, params, TOKENS[:1, part], positions[:, part]).hidden[0]
        np.testing.assert_allclose(packed[part], alone, atol=1e-5)


def test_captured_hidden_states_are_those_of_a_shallower_network():
    params = enlarged(NANO)
    out = run(NANO, params, capture=("hidden:2", "hidden:0"))
    assert sorted(out.captured) == ["hidden:0", "hidden:2"]
    shallow = override(NANO, num_layers=1)
    first = {**params, "layers": jax.tree.map(lambda leaf: leaf[:1], params["layers"])}
    expected = run(shallow, first, capture=("hidden:0",)).captured["hidden:0"]
    np.testing.assert_allclose(out.captured["hidden:0"], expected, atol=1e-5)
    # The last layer's output, normed, is the network's.
    last = out.captured["hidden:2"]
    normed = last / jnp.sqrt(jnp.mean(last**2, axis=-1, keepdims=True) + NANO.norm_eps)
    np.testing.assert_allclose(normed * params["norm"]["scale"], out.hidden, atol=1e-4)


def test_attention_entropy():
    # Zero query kernels make every attention row uniform over what it sees.
    params = enlarged(NANO)
    query = params["layers"]["block"]["attention"]["q"]["kernel"]
    params["layers"]["block"]["attention"]["q"]["kernel"] = query.at[1].set(0.0)
    capture = ("attention_entropy:0", "attention_entropy:1")
    captured = run(NANO, params, capture=capture).captured
    uniform = np.log(np.maximum(np.asarray(POSITIONS) + 1, 1))
    np.testing.assert_allclose(captured["attention_entropy:1"][LIVE], uniform[LIVE], atol=1e-6)
    first = captured["attention_entropy:0"][LIVE]
    assert (first <= uniform[LIVE] + 1e-6).all() and (first[uniform[LIVE] > 0] > 0).all()
    assert np.abs(first - uniform[LIVE]).max() > 0.1
    windowed = override(NANO, sliding_window=3)
    narrow = run(windowed, params, capture=capture).captured["attention_entropy:1"]
    np.testing.assert_allclose(narrow[LIVE], np.minimum(uniform, np.log(3))[LIVE], atol=1e-6)


def test_attention_weights_are_the_mean_over_heads_and_layers():
    params = enlarged(NANO)
    weights = run(NANO, params, capture=("attention:1-2",)).captured["attention:1-2"]
    one, two = (
        run(NANO, params, capture=(f"attention:{i}-{i}",)).captured[f"attention:{i}-{i}"]
        for i in (1, 2)
    )
    assert np.abs(one - two).max() > 1e-3
    np.testing.assert_allclose(weights, (one + two) / 2, atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1)[LIVE], 1.0, atol=1e-5)
    later = np.asarray(POSITIONS)[:, None, :] > np.asarray(POSITIONS)[:, :, None]
    assert (np.asarray(weights)[later] == 0).all()
    with pytest.raises(ValueError, match="one way"):
        run(NANO, params, capture=("attention:0-1", "attention_entropy:0"))
    with pytest.raises(ValueError, match="cannot capture"):
        run(NANO, params, capture=("attention:1-9",))


def test_captures_and_remat_change_nothing():
    params = enlarged(NANO)

    def loss(params, config, **kwargs):
        return jnp.mean(run(config, params, **kwargs).hidden[LIVE] ** 3)

    plain = jax.value_and_grad(loss)(params, NANO)
    for config, kwargs in (
        (override(NANO, remat=True, scan_unroll=3), {}),
        (NANO, {"capture": ("hidden:1", "attention_entropy:2")}),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            jax.value_and_grad(loss)(params, config, **kwargs),
            plain,
        )


def test_multi_token_heads_look_two_and_three_ahead():
    config = override(NANO, mtp_heads=2)
    params = enlarged(config)
    names = ("mtp:1", "mtp:2")
    before = run(config, params, capture=names).captured
    after = run(config, params, TOKENS.at[0, 5].set(99), capture=names).captured
    for depth, name in enumerate(names, start=1):
        moved = np.abs(after[name] - before[name])[0].max(axis=-1) > 1e-6
        # Row s knows the tokens up to s + depth and predicts the next one.
        assert moved.argmax() == 5 - depth
        assert moved[5 - depth : 10 - depth].all()

    def loss(params, config):
        return jnp.sum(run(config, params, capture=names).captured["mtp:2"] ** 3)

    joint = jax.grad(loss)(params, config)
    detached = jax.grad(loss)(params, override(config, mtp_detach=True))
    assert float(jnp.abs(joint["layers"]["block"]["mlp"]["up"]["kernel"]).max()) > 0
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(detached["layers"]))
    assert not jnp.any(detached["embed"]["embedding"])
    assert float(jnp.abs(detached["mtp_2"]["join"]["kernel"]).max()) > 0


def test_bfloat16_computes_close_to_float32_and_scores_in_float32():
    params = init(NANO, KEY)
    half = override(NANO, dtype="bfloat16", param_dtype="bfloat16")
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    out = run(half, halves)
    assert out.hidden.dtype == jnp.bfloat16
    scores = logits(halves, half, out.hidden)
    assert scores.dtype == jnp.float32
    exact = logits(params, NANO, run(NANO, params).hidden)
    np.testing.assert_allclose(scores[LIVE], exact[LIVE], atol=0.02)


def test_initialisation():
    config = preset("tiny", num_layers=8, tie_embeddings=False, value_head=True)
    leaves = flatten(init(config, KEY))
    block = "layers/block/"
    assert np.std(leaves["embed/embedding"]) == pytest.approx(0.02, rel=0.03)
    assert np.std(leaves["head/kernel"]) == pytest.approx(0.02, rel=0.03)
    assert np.std(leaves[block + "mlp/up/kernel"]) == pytest.approx(0.02, rel=0.03)
    for residual in ("mlp/down/kernel", "attention/o/kernel"):
        assert np.std(leaves[block + residual]) == pytest.approx(0.02 / 4, rel=0.03)
    first, second = leaves[block + "mlp/up/kernel"][:2]
    assert not np.allclose(first, second)
    params = init(config, KEY)
    np.testing.assert_array_equal(values(params, config, run(config, params).hidden), 0.0)


def test_learns_to_copy():
    config = preset("nano", num_layers=2)
    params = init(config, KEY)
    optimizer = optax.adam(3e-3)

    def loss(params, half):
        tokens = jnp.concatenate([half, half], axis=1)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        scores = logits(params, config, run(config, params, tokens, positions).hidden)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], tokens[:, 1:])
        return jnp.mean(losses[:, half.shape[1] :])

    @jax.jit
    def train(params, state, keys):
        def step(carry, key):
            params, state = carry
            half = jax.random.randint(key, (32, 6), 0, 8)
            value, gradient = jax.value_and_grad(loss)(params, half)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, state), keys)

    _, trace = train(params, optimizer.init(params), jax.random.split(KEY, 600))
    assert trace[0] == pytest.approx(np.log(128), abs=0.1)
    assert trace[-20:].mean() < 0.3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"capture": ("hidden:3",)}, r"'hidden:3'.*hidden:0..2"),
        ({"capture": ("routes",)}, "cannot capture 'routes'"),
        ({"capture": ("mtp:1",)}, "cannot capture 'mtp:1'"),
        ({"routes": jnp.zeros((3, 3, 10, 2), jnp.int32)}, "without experts"),
    ],
)
def test_bad_calls_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        run(NANO, init(NANO, KEY), **kwargs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: preset("tyny"), "unknown preset 'tyny'.*did you mean 'tiny'"),
        (lambda: preset("tiny", hiden_size=3), "'hiden_size'.*did you mean 'hidden_size'"),
        (lambda: preset("tiny", num_kv_heads=3), "4 heads and 3 key-value heads"),
        (lambda: preset("tiny", activation="sillu"), "did you mean 'silu'"),
        (lambda: preset("tiny", rope_scaling=(("rope_type", "yarnn"),)), "did you mean 'yarn'"),
        (lambda: preset("tiny", lora_rank=2, lora_targets=("gates",)), "did you mean 'gate'"),
        (lambda: preset("tiny", num_experts=2, experts_per_token=3), "3 of 2"),
        (lambda: preset("tiny", head_dim=7), "must be even"),
        (lambda: preset("tiny", num_layers=0), "num_layers must be at least 1"),
    ],
)
def test_bad_configurations_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_values_without_a_head_are_refused():
    params = init(NANO, KEY)
    with pytest.raises(ValueError, match="no value head.*value_head=True"):
        values(params, NANO, jnp.zeros((1, 32)))
