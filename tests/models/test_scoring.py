"""Scoring: chunks against the dense computation, gradients, memory, divergences."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig, heads, init, override, preset, scoring
from tests.models.small import enlarged, run

CONFIG = override(preset("nano"), vocab_size=23, num_layers=2)
ROWS, PROMPT, LENGTH = 3, 4, 7
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, PROMPT + LENGTH), 0, 23)
# The second prompt has two real tokens, the third response four.
POSITIONS = np.tile(np.arange(PROMPT + LENGTH), (ROWS, 1)).astype(np.int32)
POSITIONS[1] = np.maximum(POSITIONS[1] - 2, -1)
POSITIONS[2, PROMPT + 4 :] = -1
HIDDEN = jax.random.normal(jax.random.key(2), (ROWS, LENGTH, CONFIG.hidden_size))
OTHER_HIDDEN = jax.random.normal(jax.random.key(3), (ROWS, LENGTH, CONFIG.hidden_size))
TARGETS = TOKENS[:, PROMPT:]
PARAMS, OTHER = enlarged(CONFIG), enlarged(CONFIG, seed=5)

FUNCTIONS_OF_ONE = {"logprobs": scoring.log_prob, "entropy": scoring.entropy}
FUNCTIONS = {
    **FUNCTIONS_OF_ONE,
    "forward": scoring.forward_kl,
    "reverse": scoring.reverse_kl,
    "jsd": scoring.jensen_shannon,
    "nested": lambda logits, other, token: {"gap": (logits - other)[:, :2], "token": token},
}


def dense(params, hidden, temperature=1.0):
    """Plain probabilities of both models, float64 arithmetic in numpy's hands."""
    p, q = (
        np.asarray(jax.nn.softmax(heads.logits(w, CONFIG, h) / temperature), np.float64)
        for w, h in ((params, hidden), (OTHER, OTHER_HIDDEN))
    )
    m = (p + q) / 2

    def kl(a, b):
        return (a * np.log(a / b)).sum(-1)

    return {
        "logprobs": np.log(np.take_along_axis(p, np.asarray(TARGETS)[..., None], -1))[..., 0],
        "entropy": -(p * np.log(p)).sum(-1),
        "forward": kl(q, p),
        "reverse": kl(p, q),
        "jsd": (kl(p, m) + kl(q, m)) / 2,
    }


@pytest.mark.parametrize("chunk", [1, 3, 6, 9, 1000])
def test_chunks_equal_the_dense_computation(chunk):
    out = scoring.token_statistics(
        CONFIG,
        PARAMS,
        HIDDEN,
        TARGETS,
        FUNCTIONS,
        others=[(CONFIG, OTHER, OTHER_HIDDEN)],
        temperature=0.7,
        chunk=chunk,
    )
    nested = out.pop("nested")
    np.testing.assert_array_equal(nested["token"], TARGETS)
    gap = heads.logits(PARAMS, CONFIG, HIDDEN) - heads.logits(OTHER, CONFIG, OTHER_HIDDEN)
    np.testing.assert_allclose(nested["gap"], gap[..., :2] / 0.7, atol=2e-5)
    expected = dense(PARAMS, HIDDEN, 0.7)
    assert out.keys() == expected.keys()
    for name, value in out.items():
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_a_model_diverges_from_itself_by_nothing():
    names = ("forward", "reverse", "jsd")
    out = scoring.score(
        CONFIG,
        PARAMS,
        TOKENS,
        POSITIONS,
        PROMPT,
        {name: FUNCTIONS[name] for name in names},
        others=[(CONFIG, PARAMS)],
    )
    for name in names:
        np.testing.assert_allclose(out[name], 0.0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_equals_the_dense_one(tied):
    config = override(CONFIG, tie_embeddings=tied, final_softcap=5.0)
    params = enlarged(config)
    weights = jax.random.normal(jax.random.key(7), (2, ROWS, LENGTH))

    def chunked(params, hidden):
        out = scoring.token_statistics(
            config,
            params,
            hidden,
            TARGETS,
            {"logprobs": scoring.log_prob, "entropy": scoring.entropy},
            temperature=1.3,
            chunk=6,
        )
        return jnp.sum(weights[0] * out["logprobs"] + weights[1] * out["entropy"])

    def plain(params, hidden):
        log_p = jax.nn.log_softmax(heads.logits(params, config, hidden) / 1.3)
        picked = jnp.sum(log_p * jax.nn.one_hot(TARGETS, config.vocab_size), axis=-1)
        return jnp.sum(weights[0] * picked - weights[1] * jnp.sum(jnp.exp(log_p) * log_p, -1))

    ours, theirs = (
        jax.jit(jax.grad(function, argnums=(0, 1)))(params, HIDDEN) for function in (chunked, plain)
    )
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs)) > 0.1
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_row_t_predicts_response_token_t():
    hidden, captured = scoring.response_hidden(
        CONFIG, PARAMS, TOKENS, POSITIONS, PROMPT, capture=("hidden:0",)
    )
    full = run(CONFIG, PARAMS, TOKENS, POSITIONS, capture=("hidden:0",))
    np.testing.assert_allclose(hidden, full.hidden[:, PROMPT - 1 : -1], atol=1e-5)
    np.testing.assert_allclose(captured["hidden:0"], full.captured["hidden:0"], atol=1e-5)
    out = jax.jit(
        functools.partial(scoring.score, CONFIG, prompt_length=PROMPT, functions=FUNCTIONS_OF_ONE)
    )(PARAMS, TOKENS, POSITIONS)
    log_p = jax.nn.log_softmax(heads.logits(PARAMS, CONFIG, full.hidden))
    for row, column in np.ndindex(ROWS, LENGTH):
        if POSITIONS[row, PROMPT + column] >= 0:
            expected = log_p[row, PROMPT + column - 1, TOKENS[row, PROMPT + column]]
            np.testing.assert_allclose(out["logprobs"][row, column], expected, atol=1e-5)


@pytest.mark.parametrize("length", [1, LENGTH])
def test_a_prompt_read_once_for_its_group_gives_the_same_statistics_and_gradient(length):
    config = override(CONFIG, sliding_window=5, window_pattern=(True, False))
    groups, size = 2, 3
    prompts = jnp.repeat(TOKENS[:groups, :PROMPT], size, axis=0)
    responses = jax.random.randint(jax.random.key(8), (groups * size, length), 0, 23)
    tokens = jnp.concatenate([prompts, responses], axis=1)
    positions = np.repeat(POSITIONS[:groups, : PROMPT + length], size, axis=0)
    positions[1, PROMPT + 3 :] = -1
    live = positions[:, PROMPT:] >= 0
    weights = jnp.asarray(np.random.default_rng(9).normal(size=live.shape) * live)

    def scored(params, group_size):
        hidden = scoring.response_hidden(config, params, tokens, positions, PROMPT, group_size)[0]
        out = scoring.token_statistics(config, params, hidden, responses, FUNCTIONS_OF_ONE)
        return jnp.sum(weights * (out["logprobs"] + out["entropy"])), out

    run_both = jax.jit(jax.value_and_grad(scored, has_aux=True), static_argnums=1)
    ((_, found), gradient), ((_, expected), reference) = (run_both(PARAMS, n) for n in (size, 1))
    for name in FUNCTIONS_OF_ONE:
        np.testing.assert_allclose(found[name][live], expected[name][live], rtol=1e-5, atol=1e-5)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(reference))
    chex.assert_trees_all_close(gradient, reference, rtol=1e-4, atol=1e-5 * scale)


def test_a_prompt_is_shared_where_that_is_less_work():
    assert scoring.sharing_pays(CONFIG, 40, 5, 8)
    assert not scoring.sharing_pays(CONFIG, 40, 5, 1)
    assert not scoring.sharing_pays(CONFIG, 40, 400, 8)
    stretched = override(CONFIG, rope_scaling=(("rope_type", "dynamic"), ("factor", 2.0)))
    assert not scoring.sharing_pays(stretched, 40, 5, 8)


def test_half_precision_parameters_give_float32_statistics():
    half = override(CONFIG, dtype="bfloat16", param_dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    out = scoring.score(half, params, TOKENS, POSITIONS, PROMPT, FUNCTIONS_OF_ONE)
    assert {value.dtype for value in out.values()} == {jnp.dtype("float32")}
    full = scoring.score(CONFIG, PARAMS, TOKENS, POSITIONS, PROMPT, FUNCTIONS_OF_ONE)
    live = POSITIONS[:, PROMPT:] >= 0
    # bfloat16 keeps 8 bits, and these logits have a spread of several nats.
    gap = np.abs(np.asarray(out["entropy"] - full["entropy"]))[live]
    assert 0 < gap.max() < 0.2


def test_memory_is_a_small_part_of_the_dense_paths():
    config = ModelConfig(
        vocab_size=49152,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        mlp_size=8,
    )
    params = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    hidden = jax.ShapeDtypeStruct((2, 128, 8), jnp.float32)
    targets = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def temporary(chunk):
        def loss(params, hidden, targets):
            out = scoring.token_statistics(
                config, params, hidden, targets, FUNCTIONS_OF_ONE, chunk=chunk
            )
            return jnp.sum(out["logprobs"]) + jnp.sum(out["entropy"])

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        compiled = step.lower(params, hidden, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def dense():
        def loss(params, hidden, targets):
            log_p = jax.nn.log_softmax(heads.logits(params, config, hidden))
            picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)
            return jnp.sum(picked) - jnp.sum(jnp.exp(log_p) * log_p)

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        compiled = step.lower(params, hidden, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 2 * 128 * 49152 * 4
    assert dense() >= logits
    assert temporary(8) <= dense() / 8
    # Memory follows the chunk, not the batch.
    assert temporary(8) < temporary(64) < temporary(256)


def test_rows_spread_over_devices_are_scored_where_they_are():
    rows = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",))
    here, everywhere = (
        jax.sharding.NamedSharding(rows, jax.sharding.PartitionSpec(*axes))
        for axes in (("data",), ())
    )
    score = jax.jit(
        lambda params, hidden, targets: scoring.token_statistics(
            CONFIG, params, hidden, targets, FUNCTIONS_OF_ONE, chunk=8
        )
    )
    again = np.array([0, 1, 2, 0])
    hidden, targets = HIDDEN[again], TARGETS[again]
    given = [jax.device_put(PARAMS, everywhere), *jax.device_put((hidden, targets), here)]
    chex.assert_trees_all_close(score(*given), score(PARAMS, hidden, targets), atol=1e-5)
    program = score.lower(*given).compile().as_text()
    for exchange in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert exchange not in program


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"prompt_length must lie in 1..10 .*got 11"):
        scoring.response_hidden(CONFIG, PARAMS, TOKENS, POSITIONS, 11)
    with pytest.raises(ValueError, match="whole groups"):
        scoring.response_hidden(CONFIG, PARAMS, TOKENS, POSITIONS, PROMPT, 2)
    with pytest.raises(
        ValueError, match=r"hidden: expected hidden states \[3, 7, D\].*\(3, 6, 32\)"
    ):
        scoring.token_statistics(CONFIG, PARAMS, HIDDEN[:, 1:], TARGETS, {})
    with pytest.raises(ValueError, match=r"others\[0\]: expected"):
        scoring.token_statistics(
            CONFIG, PARAMS, HIDDEN, TARGETS, {}, others=[(CONFIG, OTHER, OTHER_HIDDEN[1:])]
        )
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        scoring.token_statistics(CONFIG, PARAMS, HIDDEN, TARGETS, {}, chunk=0)
