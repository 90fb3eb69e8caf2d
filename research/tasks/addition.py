"""Addition of two whole numbers, a character a token: small enough for a two-layer transformer."""

import dataclasses
import random
from typing import ClassVar

from research.tasks.base import Record, TaskError, draw, draw_heldout


def _unordered(record: Record) -> str:
    # 37+58 and 58+37 give each other away: both belong on the same side of the split.
    return "+".join(map(str, sorted(record.info["operands"])))


@dataclasses.dataclass(frozen=True)
class Addition:
    """Prompts such as `37+58=`, answered by `95`.

    Attributes:
      digits: operands have up to this many.
      max_operand: largest operand; 0 for as large as `digits` allows.
      reversed: write the answer's digits least significant first (59 for 95).
      stray: share of demonstrations that end in a stray `=` (17+25 is 42=): a bad habit that is
        learned with the sums, and that a reward can break.
      size: number of training prompts, 0 for an endless supply.
      seed: of the training prompts.
    """

    name: ClassVar[str] = "addition"
    alphabet: ClassVar[str] = "+0123456789="
    hint_format: ClassVar[str] = "{hint}={prompt}"
    rewards: ClassVar[dict[str, float]] = {"exact": 1.0}

    digits: int = 2
    max_operand: int = 0
    reversed: bool = False
    stray: float = 0.0
    size: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.digits < 1 or self.size < 0 or not 0 <= self.max_operand < 10**self.digits:
            raise TaskError(
                f"addition: digits={self.digits}, max_operand={self.max_operand}, size={self.size}"
                "; expected digits >= 1, 0 <= max_operand < 10**digits and size >= 0."
            )

    @property
    def system(self) -> str:
        order = " with its digits in reverse order" if self.reversed else ""
        return f"Reply with the sum{order} and nothing else."

    def _make(self, rng: random.Random) -> Record:
        limit = self.max_operand or 10**self.digits - 1
        a, b = rng.randint(0, limit), rng.randint(0, limit)
        answer = str(a + b)[::-1] if self.reversed else str(a + b)
        return Record(f"{a}+{b}=", answer, {"operands": (a, b)})

    def train(self, index: int) -> Record:
        """Returns a training prompt, a function of the seed and the index alone."""
        index = index % self.size if self.size else index
        return draw(self._make, seed=self.seed, index=index, key=_unordered)

    def heldout(self, n: int) -> list[Record]:
        """Returns up to n distinct sums that training never sees, in either order."""
        return draw_heldout(self._make, n, key=_unordered)

    def demonstration(self, record: Record) -> str:
        """Returns the sum, for a share of the draws (`stray`) with a stray `=` behind it."""
        stray = random.Random(f"stray/{self.seed}/{record.id}").random() < self.stray
        return record.answer + "=" * stray
