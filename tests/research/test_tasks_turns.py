"""The tasks of several turns and of checkable steps: replies, demonstrations, merged teachers."""

import numpy as np
import pytest

from research import rewards, teachers
from research.tasks import Record, TaskError, get_task

TASKS = [get_task("two_attempts"), get_task("chain", turns=2), get_task("rubric")]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_demonstrations_are_right_and_within_the_alphabet(task):
    for index in range(50):
        record = task.train(index)
        text = task.demonstration(record)
        assert set(record.prompt + text) <= set(task.alphabet)
        assert rewards.grade([text], [record], dict(task.rewards))["total"][0] == 1


@pytest.mark.parametrize("task", TASKS[:2], ids=lambda task: task.name)
def test_half_of_the_demonstrations_follow_a_wrong_attempt(task):
    shown = [(record := task.train(index), task.exchange(record)) for index in range(200)]
    wrong = [(record, *pairs[0]) for record, pairs in shown if pairs]
    assert 70 < len(wrong) < 130
    for record, attempt, reply in wrong:
        assert task.reply(record, attempt) == reply and set(reply) <= set("<>?")
        assert rewards.grade([attempt], [record], dict(task.rewards))["total"][0] == 0
    assert task.reply(*((r := task.train(0)), task.demonstration(r))) is None


def test_replies_point_to_the_answer():
    task, record = TASKS[0], Record("3+9=", "12")
    said = [task.reply(record, text) for text in ("12", "9", "30", "", "1+2", "012")]
    assert said == [None, "<", ">", "?", "?", "?"]
    chain = get_task("chain")
    assert chain.reply(record, "12#12") is None
    assert [chain.reply(record, t) for t in ("12", "12#2", "#", "1#99")] == ["?", "<", "?", ">"]


def test_a_chain_of_one_number_is_refused():
    with pytest.raises(TaskError, match="terms >= 2"):
        get_task("chain", terms=1)


def test_the_latest_policies_weigh_most_in_a_merge():
    base = {"w": np.zeros(1)}
    policies = [{"w": np.full(1, x)} for x in (100.0, 1.0, 2.0, 3.0, 4.0)]
    merged = teachers.merged(base, policies)  # the first of the five is too old
    want = (0.125 * 1 + 0.125 * 2 + 0.25 * 3 + 0.5 * 4) / 1.0
    np.testing.assert_allclose(merged["w"], [want], rtol=1e-6)
    opposed = teachers.merged(base, [{"w": np.array([-1.0])}, {"w": np.array([1.0])}])
    np.testing.assert_allclose(opposed["w"], [1.0])  # the heavier sign alone
    np.testing.assert_allclose(teachers.merged(base, policies[-1:])["w"], [4.0])
