"""Signals of the steps of a response: which are right, which plan, what they are worth."""

import collections
from collections.abc import Sequence

import numpy as np

from losses.credit.hicra import planning_mask as inside_grams
from losses.credit.spae import step_potential
from research.rollouts import answered
from research.signals import Context, signal
from research.signals.spans import answer_start, spoken_turns, step_numbers, token_starts
from research.tasks import Record
from research.tasks.chain import partial_sums, step_verdicts

GRAMS, TOP_SHARE = (3, 5), 0.2
"""HICRA: lengths of the phrases, and the share of them that counts as strategic."""
PROBES, PROBE_TEMPERATURE = 5, 0.6
"""SPAE: continuations after each step, and the temperature that they are sampled at."""
_PROBE_IDS = 1 << 20  # apart from the numbers of the run's prompts: other random keys


@signal("answer_mask")
def answer_mask(context: Context) -> np.ndarray:
    """Tokens of the answer, behind the working, [B,T] (ts-grpo)."""
    return context.once(_answer_and_working)[0]


@signal("thought_mask")
def thought_mask(context: Context) -> np.ndarray:
    """Tokens of the working, the mark in front of the answer included, [B,T] (gtr-turbo)."""
    return context.once(_answer_and_working)[1]


@signal("schema_mask")
def schema_mask(context: Context) -> np.ndarray:
    """The working as the proposal that the answer builds on; 0 without an answer (trust-sql)."""
    return context.once(_answer_and_working)[1]


def _answer_and_working(context):
    """[B,T] each; both 0 on turns without an answer."""
    answer, working = np.zeros_like(context.rollout.mask), np.zeros_like(context.rollout.mask)
    for turn in spoken_turns(context.rollout):
        at = answer_start(context.task, turn.text)
        if at is not None:
            behind = token_starts(context, turn) >= at
            answer[turn.row, turn.places] = behind
            working[turn.row, turn.places] = ~behind
    return answer, working


@signal("schema_rewards")
def schema_rewards(context: Context) -> np.ndarray:
    """1 where every step of the working is right and none is missing, [B] (trust-sql)."""
    rollout = context.rollout
    return np.array(
        [
            len(judged) == len(partial_sums(record)) and all(true for _, true in judged)
            for record, judged in zip(rollout.records, _judgements(context))
        ],
        np.float32,
    )


@signal("valid")
def valid(context: Context) -> np.ndarray:
    """0 for responses that the length limit cut off, [B] (trust-sql)."""
    return 1 - context.rollout.truncated.astype(np.float32)


@signal("step_correct")
def step_correct(context: Context) -> np.ndarray:
    """Tokens of steps that two judges call right, [B,T] (bcpg-nsa).

    A step has to follow from the one before it, and to be true of the prompt.
    """
    return _on_steps(context, lambda follows, true: follows and true)


@signal("verdicts")
def verdicts(context: Context) -> np.ndarray:
    """+1 on steps that the prompt's numbers bear out, -1 on others, [B,T] (fspo-factuality).

    0 on the answer, and on whole responses without one: nothing is checked of them.
    """
    formatted = np.array([answer_start(context.task, t) is not None for t in context.rollout.texts])
    return _on_steps(context, lambda _, true: 1 if true else -1) * formatted[:, None]


@signal("flagged")
def flagged(context: Context) -> np.ndarray:
    """Tokens of the steps that a check against the prompt rejects, [B,T] (perceval)."""
    return _on_steps(context, lambda _, true: not true)


def _judgements(context):
    rollout = context.rollout
    if "terms" not in rollout.records[0].info:
        raise ValueError(
            f"The steps of task {context.task.name!r} cannot be checked one by one; use "
            "task.name=chain."
        )
    return [step_verdicts(text, record) for text, record in zip(rollout.texts, rollout.records)]


def _on_steps(context, value):
    """A value per judged step of the last turn, on its tokens, [B,T]."""
    rollout, judged = context.rollout, _judgements(context)
    out = np.zeros_like(rollout.mask)
    for turn in spoken_turns(rollout):
        if turn.index + 1 == len(rollout.turn_texts[turn.row]):
            steps = step_numbers(context.task, turn.text, token_starts(context, turn))
            values = [float(value(*v)) for v in judged[turn.row]]
            out[turn.row, turn.places] = [values[k] if k < len(values) else 0.0 for k in steps]
    return out


@signal("planning_mask")
def planning_mask(context: Context) -> np.ndarray:
    """Tokens of phrases that many right responses to the first prompts share, [B,T] (hicra)."""
    rollout = context.rollout
    if "planning_grams" not in context.carried:
        right = [
            tokens[mask > 0].tolist()
            for tokens, mask, good in zip(rollout.tokens, rollout.mask, rollout.correct)
            if good
        ]
        if not right:
            return np.zeros_like(rollout.mask)
        found = strategic_grams(right, n_range=GRAMS, top_share=TOP_SHARE)
        padded = [[*gram, *[-1] * (GRAMS[1] - len(gram))] for gram in found]
        context.carried["planning_grams"] = np.array(padded, np.int32).reshape(-1, GRAMS[1])
    grams = [[int(t) for t in row if t >= 0] for row in context.carried["planning_grams"]]
    return np.asarray(inside_grams(rollout.tokens, grams, rollout.mask))


def strategic_grams(
    corpus: Sequence[Sequence[int]], *, n_range=(3, 5), top_share=0.2
) -> list[tuple[int, ...]]:
    """Returns the n-grams that occur in the most texts, the commonest first.

    HICRA counts clusters of paraphrases; without sentence embeddings each n-gram is its own.

    Args:
      corpus: the tokens of each right response; an n-gram counts once in each.
      n_range: shortest and longest n.
      top_share: share of the different n-grams that is kept, at least one.
    """
    counts = collections.Counter()
    for text in corpus:
        windows = (
            tuple(text[at : at + n])
            for n in range(n_range[0], n_range[1] + 1)
            for at in range(len(text) - n + 1)
        )
        counts.update(set(windows))
    ranked = sorted(counts, key=lambda gram: (-counts[gram], gram))
    return ranked[: max(int(top_share * len(ranked)), 1)]


@signal("step_potentials")
def step_potentials(context: Context) -> np.ndarray:
    """Potential of each step, from probing for the answer after it, [B,K] (spae)."""
    return context.once(_probed)[0]


@signal("potential_mask")
def potential_mask(context: Context) -> np.ndarray:
    """Which steps were probed: those that the response finished, [B,K] (spae)."""
    return context.once(_probed)[1]


def _probed(context):
    """After every step the answer's mark is put, and what the policy then answers is looked at.

    Confidence is the mean over sampled answers of exp(-mean entropy), accuracy the mean
    probability of the reference answer's tokens.
    """
    rollout, task = context.rollout, context.task
    judged = _judgements(context)
    width = len(partial_sums(rollout.records[0]))
    mask, prefixes = np.zeros((len(rollout), width), np.float32), []
    for row, (record, text) in enumerate(zip(rollout.records, rollout.texts)):
        at = answer_start(task, text)
        steps = (text if at is None else text[: at - len(task.answer_mark)]).split(task.separator)
        finished = len(judged[row]) - (at is None)
        mask[row, : min(finished, width)] = 1
        prefixes += [
            record.prompt + task.separator.join(steps[: k + 1]) + task.answer_mark
            if mask[row, k]
            else record.prompt + task.answer_mark  # not read; keeps the shape
            for k in range(width)
        ]
    answers = [record.answer for record in rollout.records for _ in range(width)]
    records = [Record(p, a) for p, a in zip(prefixes, answers)]
    ids = _PROBE_IDS + np.arange(len(records))
    sampled = context.respond(records, ids, group_size=PROBES, temperature=PROBE_TEMPERATURE)
    entropy = context.statistics("policy", ("entropy",), sampled)["entropy"]
    mean = (entropy * sampled.mask).sum(1) / np.maximum(sampled.mask.sum(1), 1)
    confidence = np.exp(-mean).reshape(-1, PROBES).mean(1)
    first = sampled.take(np.arange(0, len(sampled), PROBES))
    forced = answered(first, answers, context.tokenizer)
    forced.mask = forced.mask * (forced.tokens != context.tokenizer.eos_id)
    likely = np.exp(context.statistics("policy", ("logprobs",), forced)["logprobs"]) * forced.mask
    accuracy = likely.sum(1) / np.maximum(forced.mask.sum(1), 1)
    potential = np.asarray(step_potential(accuracy, confidence)).reshape(mask.shape)
    return potential * mask, mask
