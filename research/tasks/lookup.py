"""Looking a key up in a small table: a prompt with evidence that the answer needs."""

import dataclasses
import random
import string
from typing import ClassVar

from research.tasks.base import Record, TaskError, draw, draw_heldout


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Prompts such as `a=3;b=7;c=1;b?`, answered by `b=7`.

    A record's info has `evidence`, the entries of the table.

    Attributes:
      entries: rows of the table.
      keys: letters that keys are drawn from, without repetition in a table.
      values: digits that values are drawn from, 0 the first.
      size: number of training prompts, 0 for an endless supply.
      seed: of the training prompts.
    """

    name: ClassVar[str] = "lookup"
    separator: ClassVar[str] = ";"
    filler: ClassVar[str] = "_"
    answer_mark: ClassVar[str] = "="
    hint_format: ClassVar[str] = "{hint};{prompt}"
    alphabet: ClassVar[str] = string.ascii_lowercase + string.digits + "=;?_"
    rewards: ClassVar[dict[str, float]] = {"exact": 1.0}
    system: ClassVar[str] = "Reply with the entry of the table that is asked for and nothing else."

    entries: int = 3
    keys: int = 4
    values: int = 5
    size: int = 0
    seed: int = 0

    def __post_init__(self):
        tables = 1 <= self.entries <= self.keys <= 26 and 2 <= self.values <= 10
        if not tables or self.size < 0:
            raise TaskError(
                f"lookup: entries={self.entries}, keys={self.keys}, values={self.values}, "
                f"size={self.size}; expected 1 <= entries <= keys <= 26, 2 <= values <= 10 and "
                "size >= 0."
            )

    def _make(self, rng: random.Random) -> Record:
        keys = rng.sample(string.ascii_lowercase[: self.keys], self.entries)
        table = [f"{key}={rng.randrange(self.values)}" for key in keys]
        answer = rng.choice(table)
        return Record(";".join([*table, f"{answer[0]}?"]), answer, {"evidence": table})

    def train(self, index: int) -> Record:
        """Returns a training prompt, a function of the seed and the index alone."""
        index = index % self.size if self.size else index
        return draw(self._make, seed=self.seed, index=index)

    def heldout(self, n: int) -> list[Record]:
        """Returns up to n distinct prompts that training never sees."""
        return draw_heldout(self._make, n)

    def demonstration(self, record: Record) -> str:
        """Returns the entry."""
        return record.answer
