"""Signals of attention, hidden states and small networks, on a random model of two layers."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.ops.divergences import kl, log_softmax
from models import heads, init, preset, scoring
from models.transformer import Transformer
from research.rollouts import answered
from research.signals import SIGNALS, SPECIAL, learned, rescored, states
from research.tasks import get_task
from tests.research.made import context_of, rollout_of, text_of, tokenizer_of

CHAIN, LOOKUP, SUMS = get_task("chain"), get_task("lookup"), get_task("addition")


@functools.cache
def compiled(function):
    return jax.jit(function, static_argnums=0)


compiled_hidden = jax.jit(scoring.response_hidden, static_argnums=(0, 4))


@functools.cache
def model_of(task):
    fields = {"vocab_size": tokenizer_of(task).vocab_size, "num_layers": 2, "dtype": "float32"}
    config = preset("nano", **fields)
    return config, jax.tree.map(lambda x: 3 * x, init(config, jax.random.key(0)))


def batch(task, texts, groups=None, prompts=2, **fields):
    """Responses to the task's first prompts, two to each, with a model to measure them by."""
    records = [task.train(i // 2) for i in range(len(texts))]
    rollout = rollout_of(task, [(r, [t]) for r, t in zip(records, texts)], group_ids=groups)
    model, params = model_of(task)

    def measure(function, source="policy", rollout=None, **more):
        part = context.rollout if rollout is None else rollout
        rows = {**part.model_rows(), "mask": part.mask, **more}
        return {k: np.asarray(v) for k, v in compiled(function)(model, params, rows).items()}

    def score(names, part):
        rows = part.model_rows()
        width = part.prompts.shape[1]
        hidden, _ = compiled_hidden(model, params, rows["tokens"], rows["positions"], width)
        return {"hidden": np.asarray(hidden)}

    config = types.SimpleNamespace(
        seed=0,
        group_size=2,
        demonstrations=0,
        sampling=types.SimpleNamespace(temperature=1.0),
    )
    context = context_of(task, rollout, config=config, measure=measure, **fields)
    context.statistics = lambda source, names, other=None: score(names, other or context.rollout)
    context.model = model, params
    return context


def forward(context, capture):
    model, params = context.model
    rows = context.rollout.model_rows()
    run = compiled(_forward)
    return run((model, capture), params, rows["tokens"], rows["positions"])


def _forward(static, params, tokens, positions):
    model, capture = static
    return Transformer(model).apply({"params": params}, tokens, positions, capture=capture)


def test_attention_entropy_and_what_can_be_seen():
    context = batch(CHAIN, ["11;20#20", "7"])
    lengths = SIGNALS["context_lengths"](context)
    prompt = len(context.rollout.records[0].prompt)
    np.testing.assert_array_equal(lengths[0][:9], prompt + 1 + np.arange(9))
    found = SIGNALS["attention_entropy"](context)
    mean = np.asarray(forward(context, ("attention:0-1",)).captured["attention:0-1"])
    assert found.shape == context.rollout.mask.shape and (found[1, 2:] == 0).all()
    # A mean of rows has at least their mean entropy, and no row more than a uniform one.
    row = mean[0, context.rollout.prompts.shape[1]]
    assert 0 < found[0, 0] <= -np.sum(row * np.log(np.maximum(row, 1e-30))) + 1e-5
    assert (found <= np.log(np.maximum(lengths, 1)) + 1e-5)[context.rollout.mask > 0].all()


def test_the_flow_s_question_answer_and_map():
    context = batch(CHAIN, ["11;20#20", "7;7"])
    question = SIGNALS["question_mask"](context)
    answer = SPECIAL["answer_mask", "flowtracer_advantage"](context)
    width = context.rollout.prompts.shape[1]
    ids = context.rollout.prompts[0][question[0, :width] > 0]
    assert context.tokenizer.decode(ids) == context.rollout.records[0].prompt
    assert not question[:, width:].any() and not answer[:, :width].any()
    assert text_of(context, answer[:, width:]) == ["20.", ""]
    attention = SIGNALS["attention"](context)
    np.testing.assert_allclose(attention[0, width].sum(), 1.0, atol=1e-5)
    padding = context.rollout.prompt_positions[0] < 0
    assert padding.any() and (attention[0][:, :width][:, padding] == 0).all()


def test_context_scores_are_cosines_with_the_evidence():
    context = batch(LOOKUP, ["b=1", "b=2", "a=0", "a=1"])
    found = SIGNALS["context_scores"](context)
    pieces = ";".join(context.rollout.records[0].info["evidence"])
    captured = forward(context, ("hidden:0", "hidden:1")).captured
    model, params = context.model
    tokens = context.rollout.model_rows()["tokens"]
    embedded = np.asarray(params["embed"]["embedding"])[tokens]
    there = np.flatnonzero(context.rollout.prompt_positions[0] >= 0)[: len(pieces)]
    cosines = []
    for layer in (embedded, *(np.asarray(captured[n]) for n in ("hidden:0", "hidden:1"))):
        unit = layer[0] / np.linalg.norm(layer[0], axis=-1, keepdims=True)
        cosines.append((unit[there] @ unit[16]).mean())
    np.testing.assert_allclose(found[0, 0], np.mean(cosines), rtol=1e-4)
    assert (found[:, 4:] == 0).all()


def test_similarity_of_responses():
    context = batch(SUMS, ["12", "12", "9", "12"], groups=[0, 0, 1, 1])
    kernel = SIGNALS["similarity"](context)
    np.testing.assert_allclose(np.diag(kernel), 1.0)
    np.testing.assert_allclose(kernel, kernel.T)
    np.testing.assert_allclose(kernel[0, 1], 1.0, atol=1e-5)
    assert 0 <= kernel[0, 2] < 0.999


def test_rank_baselines_follow_the_batches():
    context = batch(CHAIN, ["11;20#20", "7;11#11"])
    metrics = SIGNALS["rank_metrics"](context)
    assert metrics.shape == (2, 3) and (metrics[:, 2] > 1).all()
    # The first step has no baseline: none that a response could be above.
    assert (SIGNALS["baselines"](context) > np.abs(metrics).max()).all()
    np.testing.assert_allclose(context.carried["rank_baselines"], 0.3 * metrics.mean(0), rtol=1e-5)
    before = context.carried["rank_baselines"]
    np.testing.assert_allclose(SIGNALS["baselines"](context), before)
    np.testing.assert_allclose(context.carried["rank_baselines"], 0.51 * metrics.mean(0), rtol=1e-5)


def test_the_extra_head_has_no_state_two_tokens_before_the_start():
    context = batch(SUMS, ["12", "7"])
    np.testing.assert_array_equal(SIGNALS["mtp_mask"](context), context.rollout.mask)
    rollout = context.rollout
    rollout.prompt_positions[0] = np.where(np.arange(16) == 15, 0, -1)  # a prompt of one token
    found = SIGNALS["mtp_mask"](context)
    assert found[0].tolist() == [0.0, *rollout.mask[0, 1:]]
    np.testing.assert_array_equal(found[1], rollout.mask[1])


def test_dependency_is_the_divergence_of_two_predictions():
    context = batch(LOOKUP, ["b=1", "b=2"])
    seen = []

    def rescore(source, names, prompts):
        seen.extend(prompts)
        full = context.statistics(source, names)["hidden"]
        return {"hidden": np.roll(full, 1, axis=-1)}

    context.rescore = rescore
    found = rescored.dependency(context)
    record = context.rollout.records[0]
    assert seen[0] == "___;___;___;" + record.prompt[-2:]
    model, params = context.model
    full = context.statistics("policy", ("hidden",))["hidden"]
    predictions = [
        log_softmax(heads.logits(params, model, jnp.asarray(h)))
        for h in (full, np.roll(full, 1, -1))
    ]
    expected = np.asarray(kl(*predictions)) * context.rollout.mask
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert found[0, 0] > 1e-3


def test_a_trained_flow_tells_solutions_from_shuffled_ones(monkeypatch):
    monkeypatch.setattr(learned, "FLOW_STEPS", 40)
    context = batch(CHAIN, ["1;2#2"] * 2)
    first = SIGNALS["flow_scores"](context)
    assert (first[context.rollout.mask > 0] > 0).all() and (first[:, 6:] == 0).all()
    kept = context.carried["flow"]
    assert kept.ndim == 1

    def mean_deviation(texts):
        context.rollout = answered(context.rollout, texts, context.tokenizer)
        context.rollout.correct = np.zeros(2, np.float32)  # so that it does not learn from them
        return SIGNALS["flow_scores"](context)[context.rollout.mask > 0].mean()

    good = [CHAIN.demonstration(r) for r in context.rollout.records]
    assert mean_deviation(good) < mean_deviation([text[::-1] for text in good])
    np.testing.assert_array_equal(context.carried["flow"], kept)


def test_the_discriminator_learns_who_the_expert_is():
    context = batch(SUMS, ["=+=", "=="], groups=[0, 0])
    expert = learned.demonstrated(context)
    assert expert.texts == [SUMS.demonstration(context.rollout.records[0])] and len(expert) == 1
    for step in range(25):
        context.step = step
        rewards = SPECIAL["token_rewards", "irl_dense_advantage"](context)
    assert (rewards[context.rollout.mask == 0] == 0).all()
    of_policy = rewards[context.rollout.mask > 0].mean()
    context.rollout = answered(context.rollout, expert.texts * 2, context.tokenizer)
    context.config.demonstrations = 2  # rows of experts are not taken for the policy's
    kept = dict(context.carried)
    shown = SPECIAL["token_rewards", "irl_dense_advantage"](context)
    assert shown[context.rollout.mask > 0].mean() > of_policy + 0.1
    assert not np.array_equal(kept["judge"], context.carried["judge"])


@pytest.mark.parametrize("layers, first, last", [(1, 0, 0), (3, 1, 1), (6, 2, 3), (12, 4, 7)])
def test_middle_layers(layers, first, last, monkeypatch):
    asked = []
    monkeypatch.setattr(
        states, "captured", lambda c, p, r, names: asked.extend(names) or {names[0]: 0}
    )
    states.middle_attention(types.SimpleNamespace(num_layers=layers), None, None)
    assert asked == [f"attention:{first}-{last}"]
