"""Preference pairs, from the grades of each group's responses."""

import numpy as np

from research.signals import Context, signal


def _best_and_worst(context):
    """Rows of the best and the worst response of each group that has two grades: (best, worst)."""
    rollout = context.rollout
    pairs = []
    for group in dict.fromkeys(rollout.group_ids.tolist()):
        rows = np.flatnonzero(rollout.group_ids == group)
        best, worst = (rows[f(rollout.rewards[rows])] for f in (np.argmax, np.argmin))
        if rollout.rewards[best] > rollout.rewards[worst]:
            pairs.append((best, worst))
    return np.array(pairs, np.int32).reshape(-1, 2).T


def _cycled(context, side):
    """One side of the pairs, gone through again up to one for each group of the batch.

    A fixed number keeps the shapes, and so the compiled update; without any pair it is zero.
    """
    if context.config.update.minibatches != 1:
        raise ValueError(
            f"update.minibatches={context.config.update.minibatches}: pairs name rows of the whole "
            "batch, which only one minibatch holds; set it to 1."
        )
    rows = context.once(_best_and_worst)[side]
    return np.resize(rows, len(np.unique(context.rollout.group_ids))) if len(rows) else rows


@signal("chosen", given="rejected")
def chosen(context: Context) -> np.ndarray:
    """Row of the best response of each pair, [P] (dpo, ipo, simpo, orpo, r-to-q)."""
    return _cycled(context, 0)


@signal("rejected")
def rejected(context: Context) -> np.ndarray:
    """Row of the worst response of each pair, [P] (dpo, ipo, simpo, orpo, r-to-q)."""
    return _cycled(context, 1)


@signal("chosen")
def chosen_flags(context: Context) -> np.ndarray:
    """1 on the responses of a group that reach its best grade, 0 on others, [B] (t-reg, tgdpo).

    A group of equal grades has no pair: all its responses count as chosen.
    """
    rollout = context.rollout
    best = {g: rollout.rewards[rollout.group_ids == g].max() for g in set(rollout.group_ids)}
    return np.array(
        [reward >= best[group] for reward, group in zip(rollout.rewards, rollout.group_ids)],
        np.float32,
    )


@signal("desirable")
def desirable(context: Context) -> np.ndarray:
    """1 on right responses, [B] (kto)."""
    return context.rollout.correct.astype(np.int32)


@signal("relevant")
def relevant(context: Context) -> np.ndarray:
    """1 on right responses: what is to be found for the prompt, [B] (ddro)."""
    return context.rollout.correct


@signal("kl_log_ratios", models=("reference",))
def kl_log_ratios(context: Context) -> np.ndarray:
    """Summed log-ratio of each response to the reference under another prompt's text, [B] (kto)."""
    rollout = context.rollout
    size = context.config.group_size
    other = [rollout.records[(row + size) % len(rollout)].prompt for row in range(len(rollout))]
    policy, reference = (
        context.rescore(source, ("logprobs",), other)["logprobs"]
        for source in ("policy", "reference")
    )
    return ((policy - reference) * rollout.mask).sum(1)


@signal("better_logprobs", models=("reference",))
def better_logprobs(context: Context) -> np.ndarray:
    """The response under the reference shown the prompt answered rightly first, [B,T] (t-reg)."""
    return _after_example(context, [record.answer for record in context.rollout.records])


@signal("worse_logprobs", models=("reference",))
def worse_logprobs(context: Context) -> np.ndarray:
    """The response under the reference shown the prompt answered wrongly first, [B,T] (t-reg).

    The wrong answer is a response of the group; where none is wrong, the next prompt's answer.
    """
    rollout, size = context.rollout, context.config.group_size
    wrong = {g: t for g, t, c in zip(rollout.group_ids, rollout.texts, rollout.correct) if c < 1}
    return _after_example(
        context,
        [
            wrong.get(group, rollout.records[(row + size) % len(rollout)].answer)
            for row, group in enumerate(rollout.group_ids)
        ],
    )


def _after_example(context, answers):
    prompts = [record.prompt for record in context.rollout.records]
    shown = [prompt + answer + prompt for prompt, answer in zip(prompts, answers)]
    return context.rescore("reference", ("logprobs",), shown)["logprobs"]
