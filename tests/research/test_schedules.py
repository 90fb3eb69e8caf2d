"""Hyperparameters that change from step to step."""

import jax
import numpy as np
import pytest

import losses
import research
from losses.catalogue import CatalogueError
from research import schedules
from research.config import composition


def test_schedules_of_a_run():
    names = ("run.step", "run.steps", "run.progress", "run.ramp", "last.kl", "last.loss")
    found = schedules.values(names, 3, 12, {"kl": 0.5})
    assert found == {"run.step": 3, "run.steps": 12, "run.progress": 0.25, "run.ramp": 0.5,
                     "last.kl": 0.5, "last.loss": 0}  # fmt: skip
    assert [schedules.SCHEDULES["window"](s, 150) for s in (19, 20, 69, 70)] == [0, 0.02, 0.02, 0]
    fading = [float(schedules.SCHEDULES["phased_out"](s, 30)) for s in (0, 10, 15, 20)]
    np.testing.assert_allclose(fading, [0.1, 0.1, 0.05, 0.0], atol=1e-7)


def test_a_bound_hyperparameter_is_read_from_the_environment():
    stage = losses.paper("tcod", advantage={"step": "run.step", "every": 1, "max_turns": 2})
    arrays = {
        "old_logprobs": np.zeros((1, 2)),
        "teacher_logprobs": np.ones((1, 2)),
        "mask": np.ones((1, 2)),
        "turn_ids": np.array([[0, 1]]),
    }
    advantage = jax.jit(lambda env: stage.advantage(env))
    for step, expected in ((0, [[1, 0]]), (1, [[1, 1]])):
        np.testing.assert_array_equal(advantage({**arrays, "run.step": np.float32(step)}), expected)
    with pytest.raises(CatalogueError, match="run.step"):
        stage.advantage(arrays)


def test_a_misspelt_schedule_is_refused():
    config = research.build("tcod", overrides={"advantage.step": "run.stpe"})
    with pytest.raises(ValueError, match="run.step"):
        composition(config)
