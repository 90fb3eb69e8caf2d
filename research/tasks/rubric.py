"""Addition under a criterion that the prompt states: in which order to write the digits."""

import dataclasses
import random
from typing import ClassVar

from research.tasks.addition import Addition
from research.tasks.base import Record

FORWARDS, BACKWARDS, UNSTATED = ">", "<", "~"


@dataclasses.dataclass(frozen=True)
class Rubric(Addition):
    """Prompts such as `>37+58=`, answered by `95`, and `<37+58=`, answered by `59`.

    A record's info has `neutral`, the prompt with `~` in place of the criterion; `translation`, the
    prompt in the forward notation and its answer; and `domain`, its notation. The attributes are
    those of `Addition`; `reversed` has no effect.
    """

    name: ClassVar[str] = "rubric"
    alphabet: ClassVar[str] = Addition.alphabet + FORWARDS + BACKWARDS + UNSTATED
    domains: ClassVar[tuple[str, str]] = ("forwards", "backwards")

    @property
    def system(self) -> str:
        return (
            f"Reply with the sum and nothing else; behind {BACKWARDS} with its digits in reverse "
            f"order, behind {FORWARDS} not."
        )

    def _make(self, rng: random.Random) -> Record:
        plain = super()._make(rng)
        backwards = rng.random() < 0.5
        answer = str(sum(plain.info["operands"]))
        return Record(
            (BACKWARDS if backwards else FORWARDS) + plain.prompt,
            answer[::-1] if backwards else answer,
            {
                **plain.info,
                "neutral": UNSTATED + plain.prompt,
                "translation": (FORWARDS + plain.prompt, answer),
                "domain": self.domains[backwards],
            },
        )

    def demonstration(self, record: Record) -> str:
        """Returns the sum in the order that the prompt asks for."""
        return record.answer
