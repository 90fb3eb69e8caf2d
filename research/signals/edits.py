"""RLMEC: the minimal edit of each response, and rewards of a model that rewrites wrong ones."""

from collections.abc import Sequence

import numpy as np

from losses.credit.rlmec import rlmec_token_rewards
from research.rollouts import Rollout, answered
from research.signals import SEQUENCES, Context, signal

KEPT, CHANGED = 0.5, 1.0
"""Weights of an edit's tokens in the imitation."""


def edited(context: Context) -> Rollout:
    """The edits as responses: right responses as they are, of wrong ones the task's rewrite."""
    rollout = context.rollout
    texts = [
        text if good > 0 else context.task.demonstration(record)
        for text, good, record in zip(rollout.texts, rollout.correct, rollout.records)
    ]
    return answered(rollout, texts, context.tokenizer)


SEQUENCES["edit_logprobs"] = edited


@signal("edit_weights")
def edit_weights(context: Context) -> np.ndarray:
    """1 on the edit's inserted or changed tokens, 1/2 on the others, 0 on padding, [B,T]."""
    rollout, edit = context.rollout, edited(context)
    out = np.zeros_like(edit.mask)
    for row in range(len(rollout)):
        before = rollout.tokens[row][rollout.mask[row] > 0].tolist()
        after = edit.tokens[row][edit.mask[row] > 0].tolist()
        out[row, : len(after)] = np.where(changed(before, after), CHANGED, KEPT)
    return out


@signal("token_rewards", given="rlmec_loss", models=("teacher",))
def token_rewards(context: Context) -> np.ndarray:
    """Rewards from the rewriting model's probability of each token, [B,T] (rlmec)."""
    rollout = context.rollout
    rewriter = context.statistics("teacher", ("logprobs",))["logprobs"]
    return np.asarray(rlmec_token_rewards(rewriter, rollout.correct, rollout.mask))


def changed(before: Sequence[int], after: Sequence[int]) -> list[bool]:
    """Which tokens of `after` a cheapest edit of `before` inserts or replaces (Levenshtein)."""
    cost = np.zeros((len(before) + 1, len(after) + 1), int)
    cost[:, 0], cost[0] = np.arange(len(before) + 1), np.arange(len(after) + 1)
    for i, old in enumerate(before, 1):
        for j, new in enumerate(after, 1):
            substituted = cost[i - 1, j - 1] + (old != new)
            cost[i, j] = min(substituted, cost[i - 1, j] + 1, cost[i, j - 1] + 1)
    out, i, j = [], len(before), len(after)
    while j:
        old_is_new = i > 0 and before[i - 1] == after[j - 1]
        if i and cost[i, j] == cost[i - 1, j - 1] + (not old_is_new):
            out.append(not old_is_new)
            i, j = i - 1, j - 1
        elif i and cost[i, j] == cost[i - 1, j] + 1:
            i -= 1
        else:
            out.append(True)
            j -= 1
    return out[::-1]
