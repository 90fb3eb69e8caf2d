"""From characters to tokens: which tokens of a response make up a step or an answer."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from research.rollouts import Rollout
from research.signals import Context


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the policy said at one turn of a row.

    Attributes:
      row, index: the row, and which of its turns.
      places: [n] positions of its tokens in the row.
      text: its decoded text.
    """

    row: int
    index: int
    places: np.ndarray
    text: str


def spoken_turns(rollout: Rollout) -> Iterator[Turn]:
    """Yields every turn that took place, row by row."""
    for row, texts in enumerate(rollout.turn_texts):
        for index, text in enumerate(texts):
            here = (rollout.mask[row] > 0) & (rollout.turn_ids[row] == index)
            yield Turn(row, index, np.flatnonzero(here), text)


def starts(tokenizer, ids) -> list[int]:
    """Character of the text at which each token begins; tokens without text begin at the end."""
    return [len(tokenizer.decode(ids[:n])) for n in range(len(ids))]


def token_starts(context: Context, turn: Turn) -> np.ndarray:
    """Character of the turn's text at which each of its tokens begins, [n]."""
    return np.array(starts(context.tokenizer, context.rollout.tokens[turn.row, turn.places]))


def answer_start(task, text: str) -> int | None:
    """Where the answer begins, behind the task's mark; None where the text has none."""
    mark = getattr(task, "answer_mark", "####")
    at = text.rfind(mark)
    return None if at < 0 else at + len(mark)


def step_numbers(task, text: str, begins: np.ndarray) -> np.ndarray:
    """Number of the step in which tokens that begin at these characters stand, [n].

    A step reaches through its separator. The answer is a step of its own, after the others.
    """
    separator = getattr(task, "separator", "\n\n")
    answer = answer_start(task, text)
    working = text if answer is None else text[:answer]
    numbers = np.array([working[:at].count(separator) for at in begins])
    return numbers if answer is None else numbers + (begins >= answer)


def separated(context: Context) -> np.ndarray:
    """Step of each token; the steps of later turns go on counting, [B,T]."""
    rollout = context.rollout
    out, count = np.zeros(rollout.tokens.shape, np.int32), 0
    for turn in spoken_turns(rollout):
        count = 0 if turn.index == 0 else count
        begins = token_starts(context, turn)
        out[turn.row, turn.places] = count + step_numbers(context.task, turn.text, begins)
        count += 1 + int(step_numbers(context.task, turn.text, begins[-1:])[0])
    return out
