"""Prompts and answers from local files, one JSON object a line."""

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any, ClassVar

from losses.catalogue import nearest
from research.answers import boxed, marked_answer
from research.tasks.base import Record, TaskError, is_heldout

_LAYOUTS = (
    '{"question", "answer": "... #### 42"} (GSM8K), {"problem", "solution": "... \\boxed{42}"} '
    '(MATH) or {"prompt", "answer"}'
)
_PROMPTS = ("question", "problem", "prompt")


def parse_line(line: str) -> Record:
    """Reads one line in the layout of GSM8K, of MATH, or plain.

    Args:
      line: a JSON object with "question" and "answer" (the final answer after ####, if there is
        reasoning), "problem" and "solution" (the final answer boxed) or "answer", or "prompt" and
        "answer".

    Returns:
      A record whose info has "solution", the full text of the answer.

    Raises:
      TaskError: neither.
    """
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TaskError(f"expected a JSON object, got {type(fields).__name__}")
    prompt = next((fields[name] for name in _PROMPTS if name in fields), None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise TaskError(f"no prompt among the fields {sorted(fields)}; expected {_LAYOUTS}")
    answer = fields.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    solution = fields.get("solution", answer)
    if answer is None and isinstance(solution, str):
        answer = boxed(solution)
        if answer is None:
            raise TaskError("its solution has no \\boxed{...} answer")
    if not isinstance(answer, str) or not isinstance(solution, str) or not answer.strip():
        raise TaskError(f"no answer among the fields {sorted(fields)}; expected {_LAYOUTS}")
    final = marked_answer(answer) or answer.strip()
    if "####" in answer:  # GSM8K writes thousands with commas
        final = final.replace(",", "")
    return Record(prompt, final, {"solution": solution})


def _read(path: str) -> list[Record]:
    file = Path(path).expanduser()
    if not file.is_file():
        there = [p.name for p in file.parent.glob("*.json*")] if file.parent.is_dir() else []
        raise TaskError(f"jsonl: no file {path!r}.{nearest(file.name, there)}")
    records: dict[str, Record] = {}
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_line(line)
        except TaskError as error:
            raise TaskError(f"{path}, line {number}: {error}.") from None
        records.setdefault(record.prompt, dataclasses.replace(record, id=number))
    if not records:
        raise TaskError(f"jsonl: {path!r} has no prompts.")
    return list(records.values())


@dataclasses.dataclass(frozen=True)
class Jsonl:
    """Prompts and answers of a file, graded by math-verify unless the run says otherwise.

    A prompt that comes twice counts once. Without a file of held-out prompts, about a tenth of the
    prompts is held out, chosen by their text.

    Attributes:
      path: the file of training prompts.
      heldout_path: the file of held-out prompts; training leaves out those it shares with it.
      seed: accepted as every task does; the file's order is its own.
      system: instructions for a chat model.
    """

    name: ClassVar[str] = "jsonl"
    rewards: ClassVar[dict[str, float]] = {"math_verify": 1.0}

    path: str = ""
    heldout_path: str = ""
    seed: int = 0
    system: str = "Reason step by step, and put your final answer within \\boxed{}."
    _train: Any = dataclasses.field(init=False, repr=False, compare=False)
    _heldout: Any = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not self.path:
            raise TaskError(f"jsonl: `path` names no file; its lines are {_LAYOUTS}.")
        records = _read(self.path)
        if self.heldout_path:
            heldout = _read(self.heldout_path)
            prompts = {record.prompt for record in heldout}
            train = [record for record in records if record.prompt not in prompts]
        else:
            heldout = [record for record in records if is_heldout(record.prompt)]
            train = [record for record in records if not is_heldout(record.prompt)]
        if not train:
            raise TaskError(f"jsonl: no training prompt is left in {self.path!r}.")
        # Files come sorted by subject or level: the first n must be a sample of all.
        random.Random("heldout").shuffle(heldout)
        object.__setattr__(self, "_train", train)
        object.__setattr__(self, "_heldout", heldout)

    @property
    def size(self) -> int:
        return len(self._train)

    @functools.cached_property
    def alphabet(self) -> str:
        records = self._train + self._heldout
        return "".join(sorted(set().union(*(r.prompt + r.info["solution"] for r in records))))

    def train(self, index: int) -> Record:
        """Returns the training prompt of that index, starting over at the end of the file."""
        return self._train[index % self.size]

    def heldout(self, n: int) -> list[Record]:
        """Returns up to n prompts that training never sees, in a fixed random order."""
        return self._heldout[:n]

    def demonstration(self, record: Record) -> str:
        """Returns the file's own solution."""
        return record.info["solution"]
