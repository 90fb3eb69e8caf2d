"""Countdown: reach a target from given numbers by arithmetic, each number used once."""

import dataclasses
import random
from fractions import Fraction
from typing import ClassVar

from research.tasks.base import Record, TaskError, draw, draw_heldout

_ATTEMPTS = 1000


@dataclasses.dataclass(frozen=True)
class Countdown:
    """Prompts such as `2 5 8 -> 18: `, answered by an expression such as `5*2+8`.

    Every target can be reached with whole, non-negative intermediate results. Any expression that
    reaches it is right (the `countdown` reward); the record's answer is one of them.

    Attributes:
      numbers: how many numbers are given.
      max_number: the largest of them; the smallest is 1.
      max_target: the largest target; the smallest is 1.
      size: number of training prompts, 0 for an endless supply.
      seed: of the training prompts.
    """

    name: ClassVar[str] = "countdown"
    alphabet: ClassVar[str] = " ()*+-/0123456789:>"
    rewards: ClassVar[dict[str, float]] = {"countdown": 1.0}
    system: ClassVar[str] = (
        "You are given numbers and, after the arrow, a target. Write an arithmetic expression with "
        "+, -, * and / that equals the target and uses each of the numbers exactly once. Give the "
        "expression alone, between <answer> and </answer>."
    )

    numbers: int = 3
    max_number: int = 9
    max_target: int = 99
    size: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.numbers < 2 or self.max_number < 1 or self.max_target < 1 or self.size < 0:
            raise TaskError(
                f"countdown: numbers={self.numbers}, max_number={self.max_number}, max_target="
                f"{self.max_target}, size={self.size}; expected numbers >= 2, max_number >= 1, "
                "max_target >= 1 and size >= 0."
            )

    def _make(self, rng: random.Random) -> Record:
        for _ in range(_ATTEMPTS):
            numbers = sorted(rng.randint(1, self.max_number) for _ in range(self.numbers))
            value, expression = _combine(numbers, rng)
            if value.denominator == 1 and 1 <= value <= self.max_target:
                prompt = f"{' '.join(map(str, numbers))} -> {value}: "
                return Record(prompt, expression, {"numbers": numbers, "target": int(value)})
        raise TaskError(
            f"countdown: no target up to max_target={self.max_target} found from {self.numbers} "
            f"numbers up to {self.max_number}; raise max_target or lower max_number."
        )

    def train(self, index: int) -> Record:
        """Returns a training prompt, a function of the seed and the index alone."""
        index = index % self.size if self.size else index
        return draw(self._make, seed=self.seed, index=index)

    def heldout(self, n: int) -> list[Record]:
        """Returns up to n distinct prompts that training never sees; numbers come sorted."""
        return draw_heldout(self._make, n)

    def demonstration(self, record: Record) -> str:
        """Returns an expression that reaches the target."""
        return record.answer


def _combine(numbers: list[int], rng: random.Random) -> tuple[Fraction, str]:
    """Joins numbers into a random expression with whole, non-negative intermediate values."""
    parts = [(Fraction(n), str(n), "") for n in numbers]
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        if a[0] < b[0]:
            a, b = b, a
        whole = b[0] != 0 and (a[0] / b[0]).denominator == 1
        operator = rng.choice("+-*/" if whole else "+-*")
        value = {"+": a[0] + b[0], "-": a[0] - b[0], "*": a[0] * b[0]}.get(operator)
        value = a[0] / b[0] if value is None else value
        left = _bracket(a, "+-") if operator in "*/" else a[1]
        right = _bracket(b, {"+": "", "-": "+-", "*": "+-", "/": "+-*/"}[operator])
        parts.append((value, f"{left}{operator}{right}", operator))
    return parts[0][:2]


def _bracket(part, operators):
    _, expression, outermost = part
    return f"({expression})" if outermost and outermost in operators else expression
