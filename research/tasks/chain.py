"""Sums with their working shown: steps that can be checked one by one, and then an answer."""

import dataclasses
import random
from typing import ClassVar

from research.tasks.base import Record, TaskError, draw, draw_heldout
from research.tasks.two_attempts import verdict

STEP, ANSWER = ";", "#"
"""What ends a step (but the last), and what stands between the working and the answer."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """Prompts such as `3+8+9=`, answered by the partial sums and the answer: `11;20#20`.

    Attributes:
      terms: how many numbers are added.
      max_operand: the largest of them; the smallest is 0.
      turns: attempts; a wrong one is answered by `<`, `>` or `?` (too low, too high, no number).
      size: number of training prompts, 0 for an endless supply.
      seed: of the training prompts.
    """

    name: ClassVar[str] = "chain"
    alphabet: ClassVar[str] = "+0123456789=<>?" + STEP + ANSWER
    rewards: ClassVar[dict[str, float]] = {"chain": 1.0}
    separator: ClassVar[str] = STEP
    hint_format: ClassVar[str] = "{hint}={prompt}"
    answer_mark: ClassVar[str] = ANSWER
    system: ClassVar[str] = (
        f"Add the numbers from left to right. Write the sum so far after each, joined by {STEP}, "
        f"then {ANSWER} and the answer, and nothing else."
    )

    terms: int = 3
    max_operand: int = 9
    turns: int = 1
    size: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.terms < 2 or self.max_operand < 1 or self.turns < 1 or self.size < 0:
            raise TaskError(
                f"chain: terms={self.terms}, max_operand={self.max_operand}, turns={self.turns}, "
                f"size={self.size}; expected terms >= 2, max_operand >= 1, turns >= 1, size >= 0."
            )

    def _make(self, rng: random.Random) -> Record:
        terms = [rng.randint(0, self.max_operand) for _ in range(self.terms)]
        return Record("+".join(map(str, terms)) + "=", str(sum(terms)), {"terms": terms})

    def train(self, index: int) -> Record:
        """Returns a training prompt, a function of the seed and the index alone."""
        index = index % self.size if self.size else index
        return draw(self._make, seed=self.seed, index=index)

    def heldout(self, n: int) -> list[Record]:
        """Returns up to n distinct prompts that training never sees."""
        return draw_heldout(self._make, n)

    def demonstration(self, record: Record) -> str:
        """Returns the right working and answer."""
        return STEP.join(map(str, partial_sums(record))) + ANSWER + record.answer

    def reply(self, record: Record, attempt: str) -> str | None:
        """Returns what the environment says to an attempt, or None where the episode ends."""
        return verdict(record, final_answer(attempt))

    def exchange(self, record: Record) -> list[tuple[str, str]]:
        """Returns what precedes a demonstration: for half of the prompts a slip at the end."""
        rng = random.Random(f"exchange/{record.prompt}")
        if self.turns == 1 or rng.random() < 0.5:
            return []
        wrong = str(int(record.answer) + rng.choice((1, 10)))
        steps = [*map(str, partial_sums(record)[:-1]), wrong]
        attempt = STEP.join(steps) + ANSWER + wrong
        return [(attempt, self.reply(record, attempt))]


def partial_sums(record: Record) -> list[int]:
    """The sums after the second, third, ... number."""
    terms = record.info["terms"]
    return [sum(terms[: n + 1]) for n in range(1, len(terms))]


def final_answer(response: str) -> str:
    """What stands behind the last `#`, or nothing."""
    _, mark, answer = response.rpartition(ANSWER)
    return answer.strip() if mark else ""


def step_verdicts(response: str, record: Record) -> list[tuple[bool, bool]]:
    """Two judgements of each written step.

    Returns:
      (follows, true) per step: it is the number before it plus the next term, whatever that number
      is; it is the true sum so far. Steps beyond the last term are neither.
    """
    terms, true = record.info["terms"], partial_sums(record)
    judged, before = [], terms[0]
    for k, text in enumerate(response.partition(ANSWER)[0].split(STEP)):
        number = int(text) if text.isascii() and text.isdigit() else None
        known = number is not None and k < len(true)
        follows = known and before is not None and number == before + terms[k + 1]
        judged.append((bool(follows), bool(known and number == true[k])))
        before = number
    return judged
