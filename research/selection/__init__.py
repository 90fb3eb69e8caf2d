"""The order of the prompts: shuffled epochs by seed, in a state small enough to checkpoint."""

import functools
from collections.abc import Callable

import numpy as np

from research.tasks import Record, Task


class PromptOrder:
    """Hands out training prompts.

    Every epoch goes through all prompts of the task in an order of its own, a function of (seed,
    epoch). An endless task (size 0) is taken in its own order, which is random already.

    Attributes:
      drawn: how many prompts were drawn so far; all there is to checkpoint.
    """

    def __init__(self, task: Task, seed: int, accept: Callable[[Record], bool] | None = None):
        """Starts at the first prompt.

        Args:
          task: where the prompts come from.
          seed: of the order.
          accept: whether to use a prompt; the hook of curricula and filters.
        """
        self.task, self.seed, self.accept = task, seed, accept
        self.drawn = 0

    def next(self, count: int) -> tuple[list[Record], list[int]]:
        """Returns the next prompts, with a number for each that no other draw of the run has.

        Args:
          count: how many; more than an epoch has left run into the next one.

        Returns:
          (records, draw numbers): a prompt that comes up again has another number, so that its
          responses form a group of their own.

        Raises:
          ValueError: `accept` refused a whole epoch (of an endless task: 100,000 prompts) in a row.
        """
        size = self.task.size
        records: list[Record] = []
        numbers: list[int] = []
        refused, patience = 0, size or 100_000
        while len(records) < count:
            number, self.drawn = self.drawn, self.drawn + 1
            epoch, position = divmod(number, size) if size else (0, number)
            index = int(_permutation(self.seed, epoch, size)[position]) if size else position
            record = self.task.train(index)
            if self.accept is None or self.accept(record):
                records.append(record)
                numbers.append(number)
                refused = 0
                continue
            refused += 1
            if refused == patience:
                raise ValueError(f"The filter refused {refused} prompts in a row; loosen it.")
        return records, numbers

    def state(self) -> dict[str, int]:
        """Returns what `restore` needs: plain integers."""
        return {"seed": self.seed, "drawn": self.drawn}

    def restore(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken.

        Raises:
          ValueError: it belongs to an order of another seed.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"The state is of seed {state['seed']}; this order has {self.seed}.")
        self.drawn = int(state["drawn"])


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
