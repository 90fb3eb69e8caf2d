"""Signals of episodes with several turns: who said what when, and how each turn went."""

import numpy as np

from losses.regularizers.epo import updated_history
from research.signals import Context, signal
from research.signals.contexts import context
from research.signals.spans import separated, spoken_turns
from research.tasks.two_attempts import NO_NUMBER

TARGETS = 3
"""HINT-SD's bound on the turns of an episode that are corrected in hindsight."""


@signal("turn_ids")
def turn_ids(context: Context) -> np.ndarray:
    """Turn of each token, [B,T] (every multi-turn paper)."""
    return context.rollout.turn_ids


@signal("turn_rewards")
def turn_rewards(context: Context) -> np.ndarray:
    """Grade of each attempt, 0 for those that did not take place, [B,K] (gem-rebn, trloo)."""
    return context.rollout.turn_rewards


@signal("turn_mask")
def turn_mask(context: Context) -> np.ndarray:
    """Which turns took place, [B,K] (gtr-turbo)."""
    rollout = context.rollout
    taken = np.array([len(texts) for texts in rollout.turn_texts])
    return (np.arange(rollout.turn_rewards.shape[1]) < taken[:, None]).astype(np.float32)


@signal("turn_values")
def turn_values(context: Context) -> np.ndarray:
    """The critic at the first token of each turn, [B,K] (gtr-turbo)."""
    values = context.statistics("policy", ("values",))["values"]
    out = np.zeros_like(context.rollout.turn_rewards)
    for turn in spoken_turns(context.rollout):
        out[turn.row, turn.index] = values[turn.row, turn.places[0]]
    return out


@signal("format_valid")
def format_valid(context: Context) -> np.ndarray:
    """Which turns the environment could read as an answer, [B,K] (gtr-turbo)."""
    out = np.zeros_like(context.rollout.turn_rewards)
    for turn in spoken_turns(context.rollout):
        out[turn.row, turn.index] = said(context, turn) != NO_NUMBER
    return out


@signal("step_ids")
def step_ids(context: Context) -> np.ndarray:
    """Turn of each token, or in tasks of one turn its step between separators, [B,T] (adrs,
    stepopsd, spae, dgrpo)."""
    if context.rollout.turn_rewards.shape[1] > 1:
        return context.rollout.turn_ids
    return separated(context)


@signal("entropy_history")
def entropy_history(context: Context) -> np.ndarray:
    """Mean entropy at each turn over earlier updates, [K]; takes this one's in for later (epo)."""
    turns = context.rollout.turn_rewards.shape[1]
    past = context.carried.get("epo_history", np.zeros(turns, np.float32))
    reached = context.carried.get("epo_reached", np.zeros(turns, np.float32))
    rollout = context.rollout
    entropy = context.statistics("policy", ("entropy",))["entropy"]
    new, count = updated_history(past, reached, entropy, rollout.turn_ids, rollout.mask)
    context.carried["epo_history"], context.carried["epo_reached"] = np.array(new), np.array(count)
    return past


@signal("skill_mask")
def skill_mask(context: Context) -> np.ndarray:
    """Tokens of the turns that there is something to learn from: wrong ones, [B,T] (seed-opd)."""
    return over_turns(context, context.once(wrong_turns))


@signal("target_mask")
def target_mask(context: Context) -> np.ndarray:
    """Tokens of the turns that failed an episode, at most three of each, [B,T] (hint-sd)."""
    failed = context.once(wrong_turns) & (context.rollout.correct < 1)[:, None]
    return over_turns(context, failed & (np.cumsum(failed, axis=1) <= TARGETS))


def wrong_turns(context: Context) -> np.ndarray:
    """Which turns gave a wrong answer, [B,K] bool."""
    out = np.zeros(context.rollout.turn_rewards.shape, bool)
    for turn in spoken_turns(context.rollout):
        out[turn.row, turn.index] = said(context, turn) is not None
    return out


def said(context: Context, turn) -> str | None:
    """What the environment has to say to a turn, in hindsight also to the last one.

    Raises:
      ValueError: the task has no environment that replies.
    """
    if not hasattr(context.task, "reply"):
        raise ValueError(
            f"Task {context.task.name!r} has no environment that replies to an attempt; use "
            "task.name=two_attempts, or chain with task.turns=2."
        )
    return context.task.reply(context.rollout.records[turn.row], turn.text)


def over_turns(context: Context, per_turn: np.ndarray) -> np.ndarray:
    """[B,K] -> [B,T], on the tokens of the policy."""
    rollout = context.rollout
    return np.take_along_axis(per_turn, rollout.turn_ids, axis=1) * rollout.mask


# OPID: a rule-based analysis of each trajectory, from the environment's own replies.


@signal("step_mask")
def step_mask(context: Context) -> np.ndarray:
    """Tokens of the critical turns, the first wrong one of each episode, [B,T] (opid)."""
    wrong = context.once(wrong_turns)
    return over_turns(context, wrong & (np.cumsum(wrong, axis=1) == 1))


@signal("episode_mask")
def episode_mask(context: Context) -> np.ndarray:
    """Tokens of all other turns, [B,T] (opid)."""
    return context.rollout.mask * (1 - step_mask(context))


@signal("step_teacher_logprobs")
def step_teacher_logprobs(context: Context) -> np.ndarray:
    """The responses under prompts that tell of the first attempt and the reply to it, [B,T]."""
    return _knowing(context, 0)


@signal("episode_teacher_logprobs")
def episode_teacher_logprobs(context: Context) -> np.ndarray:
    """The responses under prompts that tell of the episode's last attempt, [B,T] (opid)."""
    return _knowing(context, -1)


def _knowing(context, which):
    texts = [turns[which] for turns in context.rollout.turn_texts]
    told = [hindsight(context.task, r, t) for r, t in zip(context.rollout.records, texts)]
    return context.rescore("policy", ("logprobs",), told)["logprobs"]


@context("hindsight")
def outcome_told(context: Context) -> list[str]:
    """The last attempt and what the environment says to it, in front of the prompt (stepopsd,
    seed-opd, hint-sd, tt-opd)."""
    rollout = context.rollout
    return [hindsight(context.task, r, t) for r, t in zip(rollout.records, rollout.texts)]


def hindsight(task, record, attempt: str) -> str:
    """The prompt, after an attempt and what the environment says to it (`=` if it was right)."""
    reply = task.reply(record, attempt)
    return f"{attempt}{'=' if reply is None else reply}{record.prompt}"
