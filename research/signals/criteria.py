"""RTT: criteria of a response that a program can check, and the tokens that each is about."""

from collections.abc import Callable

import numpy as np

from research.signals import Context, signal
from research.signals.spans import spoken_turns, token_starts


def first_character(text: str, answer: str) -> tuple[bool, tuple[int, int]]:
    """It begins as the answer does: about its first character."""
    return text[:1] == answer[:1], (0, 1)


def last_character(text: str, answer: str) -> tuple[bool, tuple[int, int]]:
    """It ends as the answer does: about its last character."""
    return text[-1:] == answer[-1:] != "", (max(len(text) - 1, 0), max(len(text), 1))


def length(text: str, answer: str) -> tuple[bool, tuple[int, int]]:
    """It is as long as the answer: about where it stops."""
    return len(text) == len(answer), (len(text), len(text) + 1)


CRITERIA: tuple[Callable, ...] = (first_character, last_character, length)
"""(response, reference answer) -> whether it holds, and the characters it is about."""


def _judged(context):
    """Verdicts [B,R] and relevance [B,R,T], from the spans that the checks matched.

    A trained discriminator would be taught with exactly these labels.
    """
    rollout = context.rollout
    scores = np.zeros((len(rollout), len(CRITERIA)), np.float32)
    relevance = np.zeros((len(rollout), len(CRITERIA), rollout.mask.shape[1]), np.float32)
    for turn in spoken_turns(rollout):
        begins = token_starts(context, turn)
        # A token without text, such as the stop token, stands for the end.
        ends = np.maximum(np.append(begins[1:], len(turn.text)), begins + 1)
        for r, criterion in enumerate(CRITERIA):
            held, (first, last) = criterion(turn.text, rollout.records[turn.row].answer)
            scores[turn.row, r] = held
            relevance[turn.row, r, turn.places] = (begins < last) & (ends > first)
    return scores, relevance


@signal("rubric_scores")
def rubric_scores(context: Context) -> np.ndarray:
    """Verdict on each criterion, [B,R] (rtt)."""
    return context.once(_judged)[0]


@signal("relevance")
def relevance(context: Context) -> np.ndarray:
    """Tokens that each criterion is about, [B,R,T] (rtt)."""
    return context.once(_judged)[1]
