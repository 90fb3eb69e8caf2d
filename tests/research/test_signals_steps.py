"""Signals of the steps of a response, on sums with their working."""

import numpy as np
import pytest

from research.rollouts import Rollout
from research.signals import SIGNALS
from research.signals.steps import strategic_grams
from research.tasks import Record, get_task
from research.tasks.chain import step_verdicts
from tests.research.made import context_of, rollout_of, text_of

TASK = get_task("chain")
SUM = Record("3+8+9=", "20", {"terms": [3, 8, 9]})
TEXTS = ["11;20#20", "12;21#21", "12;20#20", "11;20", "11;20#2"]


@pytest.fixture
def context():
    return context_of(TASK, rollout_of(TASK, [(SUM, [text]) for text in TEXTS]))


def test_two_judges_of_each_step():
    found = {text: step_verdicts(text, SUM) for text in TEXTS}
    assert found["11;20#20"] == [(True, True), (True, True)]
    assert found["12;21#21"] == [(False, False), (True, False)]
    assert found["12;20#20"] == [(False, False), (False, True)]
    assert step_verdicts(";#;", SUM) == [(False, False), (False, False)]
    assert step_verdicts("11;20;20#20", SUM)[2] == (False, False)


def test_steps_end_with_their_separator(context):
    steps = SIGNALS["step_ids"](context)
    assert text_of(context, steps == 0)[0] == "11;"
    assert text_of(context, steps == 1)[0] == "20#"
    assert text_of(context, steps == 2) == ["20.", "21.", "20.", "", "2."]


def test_answer_and_working(context):
    assert text_of(context, SIGNALS["answer_mask"](context)) == ["20.", "21.", "20.", "", "2."]
    for name in ("thought_mask", "schema_mask"):
        found = text_of(context, SIGNALS[name](context))
        assert found == ["11;20#", "12;21#", "12;20#", "", "11;20#"]


def test_verdicts_on_steps(context):
    assert text_of(context, SIGNALS["step_correct"](context)) == [
        "11;20#",
        "",
        "",
        "11;20.",
        "11;20#",
    ]
    assert text_of(context, SIGNALS["flagged"](context)) == ["", "12;21#", "12;", "", ""]
    verdicts = SIGNALS["verdicts"](context)
    assert text_of(context, verdicts == 1) == ["11;20#", "", "20#", "", "11;20#"]
    assert text_of(context, verdicts == -1) == ["", "12;21#", "12;", "", ""]


def test_a_proposal_is_right_as_a_whole(context):
    np.testing.assert_array_equal(SIGNALS["schema_rewards"](context), [1, 0, 0, 1, 1])
    context.rollout.truncated[3] = True
    np.testing.assert_array_equal(SIGNALS["valid"](context), [1, 1, 1, 0, 1])


def test_steps_that_cannot_be_checked_are_refused():
    task = get_task("addition")
    context = context_of(task, rollout_of(task, [(Record("3+4=", "7"), ["7"])]))
    with pytest.raises(ValueError, match="task.name=chain"):
        SIGNALS["flagged"](context)


def test_strategic_grams_count_once_in_each_text():
    corpus = [[1, 2, 3, 1, 2, 3], [1, 2, 3, 4], [4, 1, 2, 3]]
    found = strategic_grams(corpus, n_range=(3, 3), top_share=0.2)
    assert found == [(1, 2, 3)]
    assert strategic_grams([[1, 2]], n_range=(3, 5)) == []


def test_planning_phrases_are_found_once_and_kept(context):
    rollout = context.rollout
    mask = SIGNALS["planning_mask"](context)
    kept = context.carried["planning_grams"]
    assert mask.max() == 1 and np.all(mask <= rollout.mask)
    assert text_of(context, mask)[0] in "11;20#20."
    context.rollout = rollout_of(TASK, [(SUM, ["20;11#11"])] * 2)
    SIGNALS["planning_mask"](context)
    assert context.carried["planning_grams"] is kept
    blank = context_of(TASK, rollout_of(TASK, [(SUM, ["1#1"])]))
    assert SIGNALS["planning_mask"](blank).max() == 0 and not blank.carried


def test_potentials_are_probed_after_every_finished_step(context):
    asked = []

    def respond(records, ids, *, group_size, temperature):
        asked.extend(records)
        assert len(set(ids)) == len(records) and temperature == 0.6
        rows = [(r, ["20"]) for r in records for _ in range(group_size)]
        return rollout_of(get_task("chain"), rows, length=4)

    def statistics(source, names, other: Rollout):
        (name,) = names
        # The policy is sure of what it samples, and gives the reference answer one half.
        values = {"entropy": 0.0, "logprobs": np.log(0.5)}
        return {name: np.full(other.tokens.shape, values[name], np.float32)}

    context.respond, context.statistics = respond, statistics
    mask = SIGNALS["potential_mask"](context)
    np.testing.assert_array_equal(mask, [[1, 1], [1, 1], [1, 1], [1, 0], [1, 1]])
    assert [r.prompt for r in asked[:2]] == ["3+8+9=11#", "3+8+9=11;20#"]
    potential = SIGNALS["step_potentials"](context)
    np.testing.assert_allclose(potential, mask * (1.5 * 0.5 + 0.25 - 1), atol=1e-6)
    assert len(asked) == 2 * len(context.rollout)  # probed once for both signals
