"""The order of the prompts: whole epochs, by seed, continued from a small state."""

import json

import pytest

from research.selection import PromptOrder
from research.tasks import get_task


def ids(records):
    return [record.id for record in records]


def test_every_epoch_is_a_permutation_of_its_own():
    order = PromptOrder(get_task("addition", size=20), seed=3)
    first, second = ids(order.next(20)[0]), ids(order.next(20)[0])
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    assert ids(PromptOrder(get_task("addition", size=20), seed=4).next(20)[0]) != first


def test_a_batch_may_cross_epochs_and_its_draws_have_distinct_numbers():
    order = PromptOrder(get_task("addition", size=3), seed=0)
    records, numbers = order.next(8)
    assert numbers == list(range(8))
    assert sorted(ids(records)[:3]) == sorted(ids(records)[3:6]) == [0, 1, 2]


def test_state_continues_the_order():
    task = get_task("addition", size=7)
    order = PromptOrder(task, seed=1)
    order.next(5)
    state = json.loads(json.dumps(order.state()))
    expected = [order.next(4) for _ in range(3)]
    resumed = PromptOrder(task, seed=1)
    resumed.restore(state)
    assert [resumed.next(4) for _ in range(3)] == expected
    with pytest.raises(ValueError, match="seed 1; this order has 2"):
        PromptOrder(task, seed=2).restore(state)


def test_endless_tasks_come_in_their_own_order():
    assert ids(PromptOrder(get_task("addition"), seed=0).next(4)[0]) == [0, 1, 2, 3]


def test_a_filter_skips_prompts_and_may_not_skip_them_all():
    task = get_task("addition", size=10)
    order = PromptOrder(task, seed=0, accept=lambda record: record.id % 2 == 0)
    assert sorted(ids(order.next(5)[0])) == [0, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="refused 10 prompts"):
        PromptOrder(task, seed=0, accept=lambda record: False).next(1)
