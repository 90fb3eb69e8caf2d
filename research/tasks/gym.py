"""Any data set of reasoning-gym, graded by its own `score_answer`."""

import dataclasses
import functools
import json
import random
import string
from typing import Any, ClassVar

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS

from losses.catalogue import nearest
from research.tasks.base import Record, TaskError, is_heldout

_SIZE = 10_000
_HELDOUT_SEED = 2**31  # outside the seeds that training draws


def gym_dataset(name: str, parameters: dict[str, Any]):
    """Returns a reasoning-gym data set, made once per process and set of parameters.

    Raises:
      TaskError: an unknown data set or parameter (with the nearest name), or a value it rejects.
    """
    return _dataset(name, json.dumps(parameters, sort_keys=True))


@functools.lru_cache(maxsize=32)
def _dataset(name, parameters):
    if name not in DATASETS:
        raise TaskError(
            f"reasoning_gym has no data set {name!r}.{nearest(name, list(DATASETS))} "
            f"It has {len(DATASETS)}: {', '.join(sorted(DATASETS))}."
        )
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    parameters = json.loads(parameters)
    for key in parameters:
        if key not in known:
            raise TaskError(
                f"reasoning_gym data set {name!r} has no parameter {key!r}.{nearest(key, known)} "
                f"Its parameters: {', '.join(k for k in known if k != 'seed')}."
            )
    try:
        return reasoning_gym.create_dataset(name, **parameters)
    except (AssertionError, TypeError, ValueError) as error:  # its configs check by assertion
        given = ", ".join(f"{k}={v!r}" for k, v in parameters.items() if k != "seed")
        raise TaskError(f"reasoning_gym rejects {name}({given}): {error}") from error


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
    """Prompts of a procedural data set of reasoning-gym.

    Attributes:
      dataset: its name, e.g. gsm_symbolic.
      parameters: fields of its config; `size` is the number of training prompts.
      seed: of the training prompts.
      system: instructions for a chat model; by default, to think first and to tag the answer.
    """

    name: ClassVar[str] = "reasoning_gym"
    rewards: ClassVar[dict[str, float]] = {"reasoning_gym": 1.0}

    dataset: str = "chain_sum"
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    system: str = SYSTEM_PROMPTS["default"]

    def __post_init__(self):
        if "seed" in self.parameters:
            raise TaskError(
                "reasoning_gym: the seed is the run's, not a parameter of the data set."
            )
        # Neighbouring seeds of reasoning-gym share all but one prompt: it adds the row to the seed.
        seeds = random.Random(self.seed).randrange(2**31), _HELDOUT_SEED
        for split, seed in zip(("_train", "_heldout"), seeds):
            parameters = {"size": _SIZE, **self.parameters, "seed": seed}
            gym_dataset(self.dataset, parameters)
            object.__setattr__(self, split, parameters)

    @property
    def size(self) -> int:
        return self._train["size"]

    @functools.cached_property
    def alphabet(self) -> str:
        seen = set(string.printable) - set("\r\v\f")
        for index in range(200):
            record = self.train(index)
            seen.update(record.prompt, record.answer)
        return "".join(sorted(seen))

    def _record(self, parameters: dict[str, Any], row: int) -> Record:
        entry = gym_dataset(self.dataset, parameters)[row]
        info = {"dataset": self.dataset, "parameters": parameters, "entry": entry}
        return Record(entry["question"], entry["answer"] or "", info, row)

    def train(self, index: int) -> Record:
        """Returns a training prompt, a function of the seed and the index alone.

        A row that is held out is replaced by another, so some rows come up twice an epoch.
        """
        row = index % self.size
        rng = random.Random(f"{self.seed}/{row}")
        for _ in range(1000):
            record = self._record(self._train, row)
            if not is_heldout(record.prompt):
                return record
            row = rng.randrange(self.size)
        raise TaskError(
            f"reasoning_gym: {self.dataset} has too few different prompts to split; raise its size."
        )

    def heldout(self, n: int) -> list[Record]:
        """Returns up to n distinct prompts that training never sees, whatever the seed."""
        found: dict[str, Record] = {}
        for row in range(self.size):
            if len(found) >= n:
                break
            record = self._record(self._heldout, row)
            if is_heldout(record.prompt):
                found.setdefault(record.prompt, dataclasses.replace(record, id=len(found)))
        return list(found.values())

    def demonstration(self, record: Record) -> str:
        """Returns the data set's own answer, in answer tags if the instructions speak of them.

        Raises:
          TaskError: the data set grades answers without having one.
        """
        if not record.answer:
            raise TaskError(
                f"reasoning_gym: {self.dataset} gives no reference answers, so it has no "
                "demonstrations to warm up on; set warmup.steps=0."
            )
        return f"<answer>{record.answer}</answer>" if "<answer>" in self.system else record.answer
