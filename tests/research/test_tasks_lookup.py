"""The table task, and what it takes to damage a text."""

import pytest

from research.rewards import grade
from research.tasks import TaskError, damaged, get_task


def test_an_answer_is_the_entry_that_is_asked_for():
    task = get_task("lookup", entries=4)
    for index in range(50):
        record = task.train(index)
        *table, question = record.prompt.split(";")
        assert table == record.info["evidence"] and len(table) == 4
        assert record.answer == next(e for e in table if e[0] == question[0])
        assert set(record.prompt + record.answer) <= set(task.alphabet)
    graded = grade([record.answer, "a"], [record, record], {"exact": 1.0})
    assert graded["total"].tolist() == [1.0, 0.0]
    with pytest.raises(TaskError, match="entries=9, keys=4"):
        get_task("lookup", entries=9)


def test_training_and_heldout_tables_are_disjoint():
    task = get_task("lookup")
    heldout = {record.prompt for record in task.heldout(40)}
    assert len(heldout) == 40
    assert not heldout & {task.train(index).prompt for index in range(400)}


@pytest.mark.parametrize("text", ["95", "3+8;11#11", "abc", "7"])
def test_damage_changes_one_place(text):
    for seed in range(20):
        wrong = damaged(text, str(seed))
        assert wrong == damaged(text, str(seed)) and wrong != text
        changed = [a != b for a, b in zip(text, wrong)]
        assert len(wrong) == len(text) and sum(changed) == 1 or len(wrong) == len(text) - 1
