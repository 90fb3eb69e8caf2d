"""Other prompts to score the same responses under: a solution shown, evidence taken away, ...

A context maps the `Context` of a step to one prompt text per row.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np

from research.signals import Context
from research.tasks import Record

CONTEXTS: dict[str, Callable[[Context], list[str]]] = {}
"""Name -> the prompts of a batch."""


def context(name: str) -> Callable:
    """Adds a context to the table: `@context("solution") def _(context): ...`."""

    def add(function):
        CONTEXTS[name] = function
        return function

    return add


def hinted(task, hint: str | None, prompt: str) -> str:
    """A prompt behind a hint, in the task's `hint_format`; without a hint the prompt itself."""
    shape = getattr(task, "hint_format", "{hint}\n\n{prompt}")
    return prompt if hint is None else shape.format(hint=hint, prompt=prompt)


def behind(context: Context, hints: Sequence[str | None]) -> list[str]:
    """The rows' prompts, each behind its hint."""
    return [hinted(context.task, h, r.prompt) for h, r in zip(hints, context.rollout.records)]


@context("solution")
def solution(context: Context) -> list[str]:
    """The task's own solution in front of the problem (copsd, rlmec)."""
    return behind(context, [context.task.demonstration(r) for r in context.rollout.records])


@context("translation")
def translation(context: Context) -> list[str]:
    """The problem and its solution in the frequent one of two notations in front of it (copsd).

    Raises:
      ValueError: the task has one notation only.
    """
    return behind(context, [_translated(context.task, r) for r in context.rollout.records])


def _translated(task, record: Record) -> str:
    if "translation" not in record.info:
        raise ValueError(
            f"Task {task.name!r} has no second notation of its prompts; use task.name=rubric."
        )
    return "".join(record.info["translation"])


def warmup_hint(name: str, task, record: Record) -> str:
    """The hint that a warm-up's demonstration stands behind, for a context of this name.

    Where a context tells of responses, which a warm-up has none of, it is the right solution.
    """
    if name == "translation":
        return _translated(task, record)
    if name == "example":
        shown = task.train(random.Random(f"example/{record.prompt}").randrange(1 << 20))
        return shown.prompt + task.demonstration(shown)
    return task.demonstration(record)


@context("example")
def example(context: Context) -> list[str]:
    """Another problem of the task with its solution in front: a skill of its type (sdar)."""
    drawn = random.Random(f"{context.config.seed}/{context.step}/example")
    shown = [context.task.train(drawn.randrange(1 << 20)) for _ in context.rollout.records]
    return behind(context, [r.prompt + context.task.demonstration(r) for r in shown])


@context("success")
def success(context: Context) -> list[str]:
    """A stored right response to the same problem in front, where there is one (drift)."""
    from research.signals.problems import stored

    return behind(context, stored(context))


@context("sibling")
def sibling(context: Context) -> list[str]:
    """Another right response of the group in front, where there is one (rlcsd)."""
    return behind(context, siblings(context, right=True, count=1)[0])


def siblings(context: Context, *, right: bool, count: int) -> list[list[str | None]]:
    """Other responses of each row's group, right or wrong ones, in a random order.

    Returns:
      `count` lists of B texts; None where the group has no further one.
    """
    rollout = context.rollout
    wanted = rollout.correct > 0 if right else rollout.correct <= 0
    rng = np.random.default_rng((context.config.seed, context.step, 11 + right))
    out = [[None] * len(rollout) for _ in range(count)]
    for row in range(len(rollout)):
        others = np.flatnonzero(wanted & (rollout.group_ids == rollout.group_ids[row]))
        others = rng.permutation(others[others != row])[:count]
        for k, other in enumerate(others):
            out[k][row] = rollout.texts[other]
    return out


# -- evidence --------------------------------------------------------------------------------------


def evidence(record: Record, task) -> list[str]:
    """The pieces of evidence in a prompt.

    Raises:
      ValueError: the task's prompts have none.
    """
    if "evidence" not in record.info:
        raise ValueError(
            f"The prompts of task {task.name!r} have no evidence to take away; use "
            "task.name=lookup."
        )
    return record.info["evidence"]


def replaced(context: Context, change: Callable[[list[str], int], list[str]]) -> list[str]:
    """The prompts with their evidence changed, by a function of its pieces and the row."""
    out = []
    for row, record in enumerate(context.rollout.records):
        pieces = evidence(record, context.task)
        joined = context.task.separator.join(pieces)
        other = context.task.separator.join(change(pieces, row))
        out.append(record.prompt.replace(joined, other, 1))
    return out


def _fill(context, text):
    """As many fillers as characters."""
    return getattr(context.task, "filler", "_") * len(text)


@context("blank")
def blank(context: Context) -> list[str]:
    """All evidence replaced by filler of the same length (pgpo, video-ktr)."""
    return replaced(context, lambda pieces, _: [_fill(context, p) for p in pieces])


@context("shuffled")
def shuffled(context: Context) -> list[str]:
    """The pieces of evidence in another order (video-ktr)."""

    def change(pieces, row):
        rng = np.random.default_rng((context.config.seed, context.step, row))
        shift = rng.integers(1, max(len(pieces), 2))  # a rotation: never the order it was
        return [*pieces[shift:], *pieces[:shift]]

    return replaced(context, change)


@context("damaged")
def damaged(context: Context) -> list[str]:
    """Every character of the evidence replaced by filler with probability one half (vppo)."""

    def change(pieces, row):
        rng = np.random.default_rng((context.config.seed, context.step, row))
        return ["".join(_fill(context, c) if rng.random() < 0.5 else c for c in p) for p in pieces]

    return replaced(context, change)
