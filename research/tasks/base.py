"""What a task is: records, the split into training and held-out prompts, the common interface."""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

HELDOUT_FRACTION = 0.1
_ATTEMPTS = 1000  # enough to meet a prompt of either side wherever there is one


class TaskError(ValueError):
    """A task that cannot be made or cannot give what was asked, and what to write instead."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One prompt and what is needed to grade a response to it.

    Attributes:
      prompt: what the policy reads.
      answer: the reference answer; empty where the task has none.
      info: whatever else the task's rewards need; survives pickling.
      id: number of the prompt within its split; equal ids are equal prompts.
    """

    prompt: str
    answer: str
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    id: int = 0


class Task(Protocol):
    """What every task offers.

    A task of several turns also has `turns`, the most attempts of an episode;
    `reply(record, attempt)`, what the environment says to an attempt, or None at the end of the
    episode; and `exchange(record)`, the (attempt, reply) pairs that precede a demonstration.

    Optional too: `hint_format`, how a hint stands in front of a prompt ("{hint}={prompt}");
    `separator`, `answer_mark`, what ends a step and begins the answer; `domains`, the values that
    `info["domain"]` of its records can have.

    Attributes:
      name: the name it is found by.
      size: number of training prompts, after which `train` starts over; 0 where it never does.
      alphabet: every character that prompts and demonstrations use, for character tokenizers.
      system: instructions for a chat model.
      rewards: reward name -> weight, used unless a run names its own.
    """

    name: str
    size: int
    alphabet: str
    system: str
    rewards: Mapping[str, float]

    def train(self, index: int) -> Record:
        """Returns a training prompt, a function of the task's seed and the index alone."""
        ...

    def heldout(self, n: int) -> list[Record]:
        """Returns up to n distinct prompts that training never sees, whatever the seed."""
        ...

    def demonstration(self, record: Record) -> str:
        """Returns a response that the task's rewards grade as correct."""
        ...


def texts(task: Task, n: int) -> list[str]:
    """Returns n training prompts, each followed by its demonstration: text for a tokenizer."""
    records = (task.train(index) for index in range(n))
    return [record.prompt + task.demonstration(record) for record in records]


def damaged(text: str, seed: str) -> str:
    """A text with one thing wrong: a digit changed by one, an operator flipped, or a letter lost.

    Args:
      text: e.g. a demonstration.
      seed: decides which; the same text and seed are always damaged alike.
    """
    rng = random.Random(f"damage/{seed}")
    digits = [i for i, c in enumerate(text) if c.isdecimal()]
    operators = [i for i, c in enumerate(text) if c in "+-"]
    if digits and not (operators and rng.random() < 0.3):
        at = rng.choice(digits)
        return text[:at] + str((int(text[at]) + rng.choice((1, 9))) % 10) + text[at + 1 :]
    if operators:
        at = rng.choice(operators)
        return text[:at] + ("-" if text[at] == "+" else "+") + text[at + 1 :]
    at = rng.randrange(max(len(text), 1))
    return text[:at] + text[at + 1 :]


def is_heldout(key: str) -> bool:
    """Whether a prompt is held out: decided by its own text, so no seed can move it across."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELDOUT_FRACTION * 2**64


def by_prompt(record: Record) -> str:
    """The default key of the split."""
    return record.prompt


def draw(
    make: Callable[[random.Random], Record],
    *,
    seed: int | str,
    index: int,
    heldout: bool = False,
    key: Callable[[Record], str] = by_prompt,
) -> Record:
    """Generates the record of (seed, index) on the wanted side of the split.

    Args:
      make: generates a record from a source of randomness.
      seed: of the task.
      index: of the record.
      heldout: the side of the split.
      key: what decides the side; prompts that give each other away share a key.

    Returns:
      The first of the records generated from (seed, index, attempt) that is on that side.

    Raises:
      TaskError: none of them is, because the task has too few different prompts.
    """
    for attempt in range(_ATTEMPTS):
        record = make(random.Random(f"{seed}/{index}/{attempt}"))
        if is_heldout(key(record)) == heldout:
            return dataclasses.replace(record, id=index)
    raise TaskError(
        f"No {'held-out' if heldout else 'training'} prompt in {_ATTEMPTS} draws (the last one: "
        f"{record.prompt!r}). The task's parameters allow too few different prompts to split; "
        "widen them."
    )


def draw_heldout(
    make: Callable[[random.Random], Record],
    n: int,
    *,
    key: Callable[[Record], str] = by_prompt,
) -> list[Record]:
    """Generates up to n held-out records with distinct keys, the same for every seed."""
    found: dict[str, Record] = {}
    for index in range(20 * n + 200):  # a small space has fewer than n: its draws only repeat
        if len(found) >= n:
            break
        record = draw(make, seed="heldout", index=index, heldout=True, key=key)
        found.setdefault(key(record), dataclasses.replace(record, id=len(found)))
    return list(found.values())[:n]
