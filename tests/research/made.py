"""Rollouts and contexts made by hand, for tests of signals."""

import dataclasses

import numpy as np

from models.tokenizers import CharTokenizer
from research import rewards
from research import rollouts as ro
from research.signals import Context


def tokenizer_of(task):
    return CharTokenizer(task.alphabet)


def rollout_of(task, episodes, group_ids=None, length=12, logprob=-0.5, prompt_width=16):
    """Episodes [(record, [what was said at each turn])], with the task's replies and grades."""
    tokenizer, width = tokenizer_of(task), getattr(task, "turns", 1)
    records = [record for record, _ in episodes]
    turns, replies, grades = [], [], []
    for k in range(width):
        said = [texts[k] if k < len(texts) else "" for _, texts in episodes]
        ids = [[*tokenizer.encode(text), tokenizer.eos_id] for text in said]
        tokens = np.zeros((len(ids), length), np.int32)
        mask = np.zeros((len(ids), length), np.float32)
        for row, known in enumerate(ids):
            tokens[row, : len(known)], mask[row, : len(known)] = known, 1
        turns.append({"tokens": tokens, "mask": mask, "logprobs": logprob * mask})
        grades.append(rewards.grade(said, records, dict(task.rewards))["total"])
        if k + 1 < width:
            replies.append(
                [
                    tokenizer.encode(task.reply(record, texts[k])) if len(texts) > k + 1 else None
                    for record, texts in episodes
                ]
            )
    last = np.array([len(texts) - 1 for _, texts in episodes])
    turn_rewards = np.stack(grades, axis=1) * (np.arange(width) <= last[:, None])
    total = turn_rewards[np.arange(len(last)), last]
    prompts, positions = ro.encode_prompts(
        [r.prompt for r in records], tokenizer.encode, prompt_width, 0
    )
    return ro.Rollout(
        prompts=prompts,
        prompt_positions=positions,
        **ro.episode(turns, replies, width * length + (width - 1), 0),
        truncated=np.zeros(len(last), bool),
        group_ids=np.zeros(len(last), np.int32) if group_ids is None else np.array(group_ids),
        records=records,
        texts=[texts[-1] for _, texts in episodes],
        rewards=total,
        components={},
        correct=(total >= 1).astype(np.float32),
        turn_rewards=turn_rewards,
        turn_texts=[texts for _, texts in episodes],
    )


def context_of(task, rollout, **given):
    """A context of a rollout; what is not given is None, and fails where it is used."""
    fields = {field.name: None for field in dataclasses.fields(Context)}
    made = {"asked": set(), "carried": {}, "memo": {}, "step": 0}
    made |= {"task": task, "tokenizer": tokenizer_of(task), "rollout": rollout}
    return Context(**{**fields, **made, **given})


def text_of(context, chosen):
    """The characters of each row that an array [B,T] is positive on; `.` for the end token."""
    rows = []
    for tokens, valid, picked in zip(context.rollout.tokens, context.rollout.mask, chosen):
        here = tokens[(valid > 0) & (picked > 0)]
        rows.append("".join(context.tokenizer.decode([t]) or "." for t in here))
    return rows
