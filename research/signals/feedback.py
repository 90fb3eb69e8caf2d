"""RLTF: the second attempt under the plain prompt, and the reply to the first as a prediction."""

import dataclasses

import numpy as np

from research.rollouts import Rollout, history
from research.signals import SEQUENCES, Context, signal


def revision(context: Context) -> Rollout:
    """The second attempts as responses to the plain prompts; empty where there was none."""
    return _moved(context, _part(context, lambda r: r.mask * (r.turn_ids == 1)))


def critique(context: Context) -> Rollout:
    """What the environment says to the first attempts, as a response to prompt and attempt."""
    rollout, pad = context.rollout, context.tokenizer.pad_id
    attempt = _part(context, lambda r: r.mask * (r.turn_ids == 0))
    reply = _part(context, lambda r: (r.present - r.mask) * (r.turn_ids == 0))
    prompts, positions = history(
        rollout.prompts,
        rollout.prompt_positions,
        {"tokens": attempt[0], "present": attempt[1]},
        pad,
    )
    return dataclasses.replace(_moved(context, reply), prompts=prompts, prompt_positions=positions)


SEQUENCES["revision_logprobs"] = revision
SEQUENCES["critique_logprobs"] = critique


def _part(context, choose):
    """The chosen tokens of each row, moved to its beginning: tokens and mask [B,T]."""
    rollout = context.rollout
    chosen = choose(rollout) > 0
    tokens = np.full_like(rollout.tokens, context.tokenizer.pad_id)
    mask = np.arange(tokens.shape[1]) < chosen.sum(1)[:, None]
    tokens[mask] = rollout.tokens[chosen]
    return tokens, mask.astype(np.float32)


def _moved(context, part):
    tokens, mask = part
    return dataclasses.replace(context.rollout, tokens=tokens, mask=mask, present=mask)


@signal("revision_mask")
def revision_mask(context: Context) -> np.ndarray:
    """Tokens of the second attempts, [B,T] (rltf)."""
    return revision(context).mask


@signal("critique_mask")
def critique_mask(context: Context) -> np.ndarray:
    """Tokens of the replies to the first attempts, [B,T] (rltf)."""
    return critique(context).mask


@signal("revision_old_logprobs")
def revision_old_logprobs(context: Context) -> np.ndarray:
    """The second attempts under the plain prompt, before the update, [B,T] (rltf)."""
    return context.statistics("policy", ("logprobs",), revision(context))["logprobs"]


@signal("first_rewards")
def first_rewards(context: Context) -> np.ndarray:
    """Grade of the first attempts, [B] (rltf)."""
    return context.rollout.turn_rewards[:, 0]


@signal("revision_rewards")
def revision_rewards(context: Context) -> np.ndarray:
    """Grade of the second attempts, 0 where there was none, [B] (rltf)."""
    if context.rollout.turn_rewards.shape[1] != 2:
        raise ValueError(
            f"Task {context.task.name!r} has {context.rollout.turn_rewards.shape[1]} turns, not an "
            "attempt and its revision; use task.name=two_attempts."
        )
    return context.rollout.turn_rewards[:, 1]
