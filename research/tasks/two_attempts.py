"""Addition with a second attempt after the environment's reply: the smallest task of two turns."""

import dataclasses
import random
from typing import ClassVar

from research.tasks.addition import Addition
from research.tasks.base import Record

TOO_LOW, TOO_HIGH, NO_NUMBER = "<", ">", "?"


def verdict(record: Record, attempt: str) -> str | None:
    """What is said to an attempt, or None to a right one.

    Returns:
      "<" to a number below the answer, ">" to one above it, "?" to what is no number.
    """
    if attempt == record.answer:
        return None
    if not (attempt.isascii() and attempt.isdigit()):
        return NO_NUMBER
    if int(attempt) == int(record.answer):
        return NO_NUMBER  # with zeros in front
    return TOO_LOW if int(attempt) < int(record.answer) else TOO_HIGH


@dataclasses.dataclass(frozen=True)
class TwoAttempts(Addition):
    """Prompts such as `37+58=`; a wrong attempt is answered by `<`, `>` or `?`, and tried again.

    An episode ends with a right attempt or with the second one, and is graded by its last. The
    attributes are those of `Addition`.
    """

    name: ClassVar[str] = "two_attempts"
    alphabet: ClassVar[str] = Addition.alphabet + TOO_LOW + TOO_HIGH + NO_NUMBER
    turns: ClassVar[int] = 2

    @property
    def system(self) -> str:
        return (
            super().system + f" If the reply is {TOO_LOW} your number is too low, if it is "
            f"{TOO_HIGH} it is too high, if it is {NO_NUMBER} it is no number; answer again."
        )

    def reply(self, record: Record, attempt: str) -> str | None:
        """Returns what the environment says to an attempt, or None where the episode ends."""
        return verdict(record, attempt.strip())

    def exchange(self, record: Record) -> list[tuple[str, str]]:
        """Returns what precedes a demonstration: for half of the prompts a wrong attempt.

        The attempt is near the answer, and comes with the reply to it.
        """
        rng = random.Random(f"exchange/{record.prompt}")
        if rng.random() < 0.5:
            return []
        wrong = str(abs(int(record.answer) + rng.choice((-10, -2, -1, 1, 2, 10))))
        said = self.reply(record, wrong)
        return [] if said is None else [(wrong, said)]
