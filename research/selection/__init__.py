"""The order of the prompts: shuffled epochs by seed, in a state small enough to checkpoint."""

import functools
from collections.abc import Callable

import numpy as np


def initial_state(seed: int) -> dict[str, int]:
    """Returns the state before the first prompt: plain integers, saved with a checkpoint."""
    return {"seed": seed, "epoch": 0, "position": 0}


def next_prompts(
    state: dict[str, int],
    size: int,
    count: int,
    accept: Callable[[int], bool] | None = None,
) -> tuple[list[int], dict[str, int]]:
    """Picks the next prompts.

    Every epoch goes through all prompts in an order of its own, a function of (seed, epoch). An
    endless task (size 0) is taken in its own order, which is random already.

    Args:
      state: from `initial_state` or the previous call; not changed.
      size: number of training prompts, 0 for endless.
      count: how many to pick; more than `size` runs into the next epoch.
      accept: index -> whether to use the prompt; the hook of curricula and filters.

    Returns:
      (indices for `task.train`, the state after them).

    Raises:
      ValueError: `accept` turned down a whole epoch (an endless task: 100,000 prompts) in a row.
    """
    seed, epoch, position = state["seed"], state["epoch"], state["position"]
    picked: list[int] = []
    refused, patience = 0, size or 100_000
    while len(picked) < count:
        if size and position == size:
            epoch, position = epoch + 1, 0
        index = int(_permutation(seed, epoch, size)[position]) if size else position
        position += 1
        if accept is None or accept(index):
            picked.append(index)
            refused = 0
            continue
        refused += 1
        if refused == patience:
            raise ValueError(f"The prompt filter refused {refused} prompts in a row; loosen it.")
    return picked, {"seed": seed, "epoch": epoch, "position": position}


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
