"""Tasks with verifiable rewards; `TASKS` lists them."""

import dataclasses
from typing import Any

from losses.catalogue import nearest
from research.tasks.addition import Addition
from research.tasks.base import Record, Task, TaskError, damaged, texts
from research.tasks.chain import Chain
from research.tasks.countdown import Countdown
from research.tasks.gym import ReasoningGym
from research.tasks.jsonl import Jsonl
from research.tasks.lookup import Lookup
from research.tasks.rubric import Rubric
from research.tasks.two_attempts import TwoAttempts

TASKS = {
    task.name: task
    for task in (Addition, Chain, Countdown, Jsonl, Lookup, ReasoningGym, Rubric, TwoAttempts)
}
"""Name -> class; its fields are the task's parameters."""

__all__ = [
    "TASKS",
    "Record",
    "Task",
    "TaskError",
    "damaged",
    "get_task",
    "task_parameters",
    "texts",
]


def _fields(name: str) -> dict[str, Any]:
    if name not in TASKS:
        raise TaskError(
            f"Unknown task {name!r}.{nearest(name, list(TASKS))} Tasks: {', '.join(TASKS)}."
        )
    return {field.name: field.default for field in dataclasses.fields(TASKS[name]) if field.init}


def task_parameters(name: str) -> dict[str, Any]:
    """Returns the parameters of a task with their defaults, without the seed.

    Raises:
      TaskError: no such task, with the nearest name.
    """
    fields = _fields(name)
    return {key: fields[key] for key in fields if key not in ("seed", "parameters")}


def get_task(name: str, *, seed: int = 0, **parameters: Any) -> Task:
    """Makes a task.

    Args:
      name: one of `TASKS`.
      seed: of the training prompts; the held-out prompts do not depend on it.
      **parameters: the task's own (`task_parameters`); those of `reasoning_gym` include its
        dataset's.

    Returns:
      The task.

    Raises:
      TaskError: an unknown task or parameter (with the nearest name), or a value it cannot use.
    """
    fields = _fields(name)
    known = {key: value for key, value in parameters.items() if key in fields}
    extra = {key: value for key, value in parameters.items() if key not in fields}
    if "parameters" in fields:
        known["parameters"] = {**known.get("parameters", {}), **extra}
    elif extra:
        wrong = next(iter(extra))
        raise TaskError(
            f"Task {name!r} has no parameter {wrong!r}.{nearest(wrong, list(fields))} "
            f"Its parameters: {', '.join(task_parameters(name))}."
        )
    return TASKS[name](seed=seed, **known)
