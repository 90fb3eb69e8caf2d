"""Signals of other prompts, edits, audited chunks, criteria and stored successes."""

import types

import numpy as np
import pytest

from research import teachers
from research.config import ConfigError
from research.rollouts import answered
from research.signals import SEQUENCES, SIGNALS, SPECIAL, edits
from research.signals.chunks import overlap
from research.signals.contexts import CONTEXTS, warmup_hint
from research.signals.criteria import CRITERIA
from research.signals.problems import stored
from research.tasks import Record, get_task
from tests.research.made import context_of, rollout_of, text_of

SUMS, LOOKUP, RUBRIC = get_task("addition"), get_task("lookup"), get_task("rubric")
SUM = Record("17+25=", "42", {"operands": (17, 25)}, 0)
TABLE = Record("a=3;b=1;c=4;b?", "b=1", {"evidence": ["a=3", "b=1", "c=4"]}, 0)


def config(**fields):
    return types.SimpleNamespace(**{"seed": 0, "group_size": 2, **fields})


def batch(task, rows, groups=None, **given):
    rollout = rollout_of(task, [(record, [text]) for record, text in rows], group_ids=groups)
    return context_of(task, rollout, config=config(), **given)


def test_evidence_is_blanked_shuffled_and_damaged():
    context = batch(LOOKUP, [(TABLE, "b=1")] * 3)
    assert CONTEXTS["blank"](context) == ["___;___;___;b?"] * 3
    for prompt in CONTEXTS["shuffled"](context):
        *pieces, question = prompt.split(";")
        assert sorted(pieces) == TABLE.info["evidence"] and question == "b?"
        assert pieces != TABLE.info["evidence"]
    damaged = CONTEXTS["damaged"](context)
    assert len(set(damaged)) > 1
    for prompt in damaged:
        assert all(b in (a, "_") for a, b in zip(TABLE.prompt, prompt)) and prompt[-2:] == "b?"
        assert 0 < prompt.count("_") < 9
    with pytest.raises(ValueError, match="task.name=lookup"):
        CONTEXTS["blank"](batch(SUMS, [(SUM, "42")]))


def test_hints_in_front_of_the_prompt():
    context = batch(SUMS, [(SUM, "42"), (SUM, "41"), (SUM, "40"), (SUM, "43")])
    assert CONTEXTS["solution"](context) == ["42=17+25="] * 4
    right = CONTEXTS["sibling"](context)
    assert right == ["17+25="] + ["42=17+25="] * 3  # the only right one has no right sibling
    example = CONTEXTS["example"](context)[0]
    assert example.endswith("=17+25=") and example != "42=17+25="
    record = RUBRIC.train(0)
    twin = CONTEXTS["translation"](batch(RUBRIC, [(record, "1")]))[0]
    assert twin == f"{''.join(record.info['translation'])}={record.prompt}"
    assert warmup_hint("translation", RUBRIC, record) + "=" + record.prompt == twin
    assert warmup_hint("sibling", SUMS, SUM) == "42"


def test_wrong_hints_are_other_wrong_responses_of_the_group():
    context = batch(SUMS, [(SUM, "42"), (SUM, "41"), (SUM, "40"), (SUM, "42")], groups=[1, 1, 1, 2])
    asked = []

    def rescore(source, names, prompts):
        asked.append(prompts)
        return {"logprobs": np.full(context.rollout.tokens.shape, -len(asked), np.float32)}

    context.rescore = rescore
    found, exist = SIGNALS["wrong_logprobs"](context), SIGNALS["wrong_mask"](context)
    assert found.shape == (4, 4, context.rollout.tokens.shape[1]) and len(asked) == 4
    # Row 0 is the right one: behind it stand two wrong ones, but no right sibling.
    np.testing.assert_array_equal(exist, [[0] * 4, [1, 0, 0, 0], [1, 0, 0, 0], [0] * 4])
    assert {prompts[0] for prompts in asked} == {"41=17+25=", "40=17+25=", "17+25="}
    assert asked[0][1] == "40=17+25=" and asked[0][2] == "41=17+25=" and asked[0][3] == "17+25="


def test_edits_of_wrong_responses():
    context = batch(SUMS, [(SUM, "42"), (SUM, "47"), (SUM, "2")])
    edited = SEQUENCES["edit_logprobs"](context)
    assert edited.texts == ["42", "42", "42"]
    np.testing.assert_array_equal(
        SIGNALS["edit_weights"](context)[:, :4],
        [[0.5, 0.5, 0.5, 0], [0.5, 1, 0.5, 0], [1, 0.5, 0.5, 0]],
    )
    likely = np.log(np.full(context.rollout.tokens.shape, 0.7, np.float32))
    context.statistics = lambda source, names: {"logprobs": likely}
    found = SPECIAL["token_rewards", "rlmec_loss"](context)
    np.testing.assert_allclose(found[0, :3], 0.2, rtol=1e-5)
    assert (found[1:] == 0).all()  # the rewriter does not object


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ([1, 2, 3], [1, 2, 3], [0, 0, 0]),
        ([1, 2, 3], [1, 9, 3], [0, 1, 0]),
        ([1, 3], [1, 2, 3], [0, 1, 0]),
        ([1, 2, 3], [1, 3], [0, 0]),
        ([], [4, 5], [1, 1]),
        ([7], [], []),
    ],
)
def test_changed_tokens_of_a_cheapest_edit(before, after, expected):
    assert edits.changed(before, after) == [bool(x) for x in expected]


def test_a_teacher_s_continuations_support_what_they_repeat():
    context = batch(SUMS, [(SUM, "4281"), (SUM, "1")])
    rollout, size = context.rollout, 3
    context.config = config(objective=types.SimpleNamespace(n_rollouts=2))
    entropy = np.zeros(rollout.mask.shape, np.float32)
    entropy[0, 1] = 1.0
    context.statistics = lambda source, names: {"entropy": entropy}
    ids = SIGNALS["chunk_ids"](context)
    assert ids[0, :5].tolist() == [-1, 0, 0, 0, -1] and (ids[1] == -1).all()
    prefixes = []

    def continuations(source, prompts, positions, *, group_size, salt):
        assert source == "teacher" and group_size == 2
        prefixes.append(context.tokenizer.decode(prompts[0][positions[0] >= 0]))
        tokens = np.repeat(rollout.tokens[:1, 1 : 1 + size], 2 * len(prompts), axis=0)
        tokens[1] = tokens[1, ::-1]
        return {"tokens": tokens, "mask": np.ones_like(tokens)}

    context.continuations = continuations
    support = SIGNALS["chunk_support"](context)
    assert prefixes == ["17+25=4"]  # the chunk itself is not shown
    assert support[0, 0] == pytest.approx(1.0) and support.sum() == pytest.approx(1.0)


def test_overlap_of_bigrams():
    assert overlap([1, 2, 3], [1, 2, 3]) == 1 and overlap([1, 2, 3], [3, 2, 1]) == 0
    assert overlap([1, 2, 3], [1, 2, 9]) == 0.5 and overlap([4], [4]) == 1 == overlap(
        [1, 1], [1, 1]
    )


def test_criteria_and_the_tokens_they_are_about():
    context = batch(SUMS, [(SUM, "42"), (SUM, "412"), (SUM, "9")])
    np.testing.assert_array_equal(
        SIGNALS["rubric_scores"](context), [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    )
    about = SIGNALS["relevance"](context)
    assert about.shape[:2] == (3, len(CRITERIA))
    assert text_of(context, about[:, 0]) == ["4", "4", "9"]
    assert text_of(context, about[:, 1]) == ["2", "2", "9"]
    assert text_of(context, about[:, 2]) == [".", ".", "."]


def test_successes_and_pass_rates_are_kept_over_the_run():
    context = batch(SUMS, [(SUM, "41"), (SUM, "40")])
    np.testing.assert_array_equal(SIGNALS["pass_rate"](context), [0, 0])
    assert stored(context) == [None, None]
    np.testing.assert_array_equal(SIGNALS["demo_mask"](context), [0, 0])
    later = batch(SUMS, [(SUM, "42"), (SUM, "41")], carried=context.carried)
    np.testing.assert_allclose(SIGNALS["pass_rate"](later), 0.3 * 0.5, rtol=1e-6)
    assert CONTEXTS["success"](later) == ["42=17+25="] * 2
    np.testing.assert_array_equal(SIGNALS["demo_mask"](later), [1, 1])
    again = batch(SUMS, [(SUM, "0"), (SUM, "1")], carried=later.carried)
    np.testing.assert_allclose(SIGNALS["pass_rate"](again), 0.7 * 0.15, rtol=1e-6)
    assert stored(again) == ["42", "42"]  # not forgotten


def test_other_responses_to_the_same_prompts():
    rollout = batch(SUMS, [(SUM, "42"), (SUM, "1")]).rollout
    context = batch(SUMS, [(SUM, "42")])
    other = answered(rollout, ["7", "1234567890123"], context.tokenizer)
    assert other.mask.sum(1).tolist() == [2, 12] and other.truncated.tolist() == [False, True]
    np.testing.assert_array_equal(other.prompts, rollout.prompts)


def test_teachers_by_flag():
    assert teachers.parse("sft:400:solution") == teachers.Teacher("sft", 400, "solution")
    assert teachers.parse("self:sibling") == teachers.Teacher("self", 0, "sibling")
    assert teachers.parse("/models/big") == teachers.Teacher("/models/big")
    with pytest.raises(ConfigError, match="Did you mean 'solution'"):
        teachers.parse("self:soluton")
    with pytest.raises(ConfigError, match="expected sft:STEPS"):
        teachers.parse("sft:many")


def test_a_teacher_with_other_tokens_is_refused():
    one, two = (
        batch(SUMS, [(SUM, "42")]).tokenizer,
        batch(RUBRIC, [(RUBRIC.train(0), "1")]).tokenizer,
    )
    teachers.check_tokenizer("dir", one, one, "17+25=42")
    with pytest.raises(ConfigError, match="teacher='dir' has another tokenizer"):
        teachers.check_tokenizer("dir", two, one, "17+25=42")
