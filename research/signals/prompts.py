"""Signals that look at prompts: what is known of each beside this step's responses to it."""

import jax.numpy as jnp
import numpy as np

from losses.advantages.gdro import difficulty_class, gdro_update
from losses.advantages.mssr import beta_estimate, beta_forgetting, beta_update
from losses.advantages.pair_wgrpo import select_pairs
from losses.baselines.grpo_advantage import grpo_advantage
from losses.ops.divergences import kl_estimate
from losses.ops.masked import masked_mean
from losses.ops.ratios import log_ratio, token_ratio
from losses.ops.surrogates import clipped_surrogate
from research.rollouts import Rollout
from research.signals import Context, signal

REFERENCE_SAMPLES, PROBES = 16, 16
"""Responses of the reference to a prompt (pvpo), of the policy in search of pairs (pair-wgrpo)."""
KL_WINDOW = 20
"""Steps over which MSSR averages its KL."""
OUTCOMES = 50
"""Visits to a prompt that GDRO judges its difficulty by."""
CLASSES = 3
_EXTRA_IDS = 1 << 21  # apart from the numbers of the run's prompts: other random keys


def table(context: Context, name: str, start, rows: np.ndarray) -> np.ndarray:
    """A carried array with a row per prompt of the task, grown to hold the rows asked for.

    Args:
      context: its `carried` keeps the table.
      name: of the table.
      start: [D] values of a prompt that was never seen.
      rows: ids of the prompts that will be read or written.
    """
    start = np.asarray(start, np.float32)
    found = context.carried.get(name, np.zeros((0, len(start)), np.float32))
    short = int(rows.max()) + 1 - len(found)
    if short > 0:
        found = np.concatenate([found, np.tile(start, (short, 1))])
    context.carried[name] = np.array(found)
    return context.carried[name]


def first_rows(rollout: Rollout) -> np.ndarray:
    """The first row of each group, in order."""
    return np.sort(np.unique(rollout.group_ids, return_index=True)[1])


def prompt_ids(rollout: Rollout) -> np.ndarray:
    """The task's number of each row's prompt, [B]."""
    return np.array([record.id for record in rollout.records])


def _asked_again(context, samples, source):
    """Rewards [P,samples] of further responses to the batch's prompts, and their first rows."""
    rollout, first = context.rollout, first_rows(context.rollout)
    more = context.respond(
        [rollout.records[row] for row in first],
        rollout.group_ids[first] + _EXTRA_IDS,
        group_size=samples,
        source=source,
    )
    return more.rewards.reshape(-1, samples), first


def _reference_rewards(context):
    return _asked_again(context, REFERENCE_SAMPLES, "reference")


@signal("ref_rewards", models=("reference",))
def ref_rewards(context: Context) -> np.ndarray:
    """Rewards of responses of the reference to the batch's prompts, [N] (pvpo)."""
    return context.once(_reference_rewards)[0].reshape(-1)


@signal("ref_group_ids", models=("reference",))
def ref_group_ids(context: Context) -> np.ndarray:
    """The prompts of `ref_rewards`, [N] (pvpo)."""
    rewards, first = context.once(_reference_rewards)
    return np.repeat(context.rollout.group_ids[first], rewards.shape[1])


@signal("prompt_values", models=("reference",))
def reference_values(context: Context) -> np.ndarray:
    """Mean reward of the reference at each row's prompt, [B] (a-lol).

    A Monte Carlo estimate of what the paper fits a value head to.
    """
    rewards, first = context.once(_reference_rewards)
    groups = context.rollout.group_ids
    place = {group: n for n, group in enumerate(groups[first])}
    return rewards.mean(1)[[place[group] for group in groups]].astype(np.float32)


@signal("prompt_values", given="mssr_advantage", models=("reference",))
def beta_values(context: Context) -> np.ndarray:
    """Success rate of each prompt by its Beta state before this step, [B] (mssr)."""
    rollout, ids = context.rollout, prompt_ids(context.rollout)
    state = table(context, "mssr_beta", [1.0, 1.0], ids)
    values = np.asarray(beta_estimate(state[ids]))
    past = context.carried.get("mssr_kl", np.zeros(0, np.float32))
    eta = beta_forgetting(float(past.mean()) if len(past) else 0.0)
    visit = np.array([np.sum(ids[:row] == prompt) for row, prompt in enumerate(ids)])
    for n in range(visit.max() + 1):  # a prompt that comes twice in a batch is updated twice
        rows = visit == n
        state = beta_update(jnp.asarray(state), rollout.rewards[rows], ids[rows], eta)
    context.carried["mssr_beta"] = np.asarray(state)
    logprobs = (context.statistics(s, ("logprobs",))["logprobs"] for s in ("policy", "reference"))
    kl = masked_mean(kl_estimate(log_ratio(*logprobs, rollout.mask)), rollout.mask)
    context.carried["mssr_kl"] = np.append(past, np.float32(kl))[-KL_WINDOW:]
    return values


def _pairs(context):
    """The pairs of a hard and an easy prompt among the batch's, by success on further responses."""
    rewards, first = _asked_again(context, PROBES, "sampler")
    found = np.asarray(select_pairs((rewards >= 1.0).mean(1), n_pairs=len(first) // 2))
    groups = context.rollout.group_ids
    role, pair = np.zeros(len(groups), np.float32), groups.astype(np.int32)
    for number, (hard, easy) in enumerate(found[found[:, 0] >= 0]):
        for prompt, sign in ((hard, 1), (easy, -1)):
            rows = groups == groups[first[prompt]]
            role[rows], pair[rows] = sign, -1 - number
    return role, pair


@signal("pair_role")
def pair_role(context: Context) -> np.ndarray:
    """+1 on responses to a hard prompt of a pair, -1 on an easy one's, 0 on others, [B]
    (pair-wgrpo)."""
    return context.once(_pairs)[0]


@signal("pair_ids")
def pair_ids(context: Context) -> np.ndarray:
    """The pair of each response; prompts without a partner are pairs of their own, [B]
    (pair-wgrpo)."""
    return context.once(_pairs)[1]


@signal("class_ids")
def class_ids(context: Context) -> np.ndarray:
    """Difficulty class of each row's prompt, by its visits before this step, [B] (gdro)."""
    return context.once(_classes)


def _classes(context):
    rollout, ids = context.rollout, prompt_ids(context.rollout)
    outcomes = table(context, "gdro_outcomes", [np.nan] * OUTCOMES, ids)
    classes = table(context, "gdro_classes", [0.0], ids)
    seen = ~np.isnan(outcomes)
    accuracy = np.where(seen, outcomes, 0.0).sum(1) / np.maximum(seen.sum(1), 1)
    current = np.asarray(difficulty_class(accuracy, classes[:, 0].astype(np.int32)))
    context.carried["gdro_classes"] = current[:, None].astype(np.float32)
    for row in first_rows(rollout):
        group = rollout.group_ids == rollout.group_ids[row]
        past = outcomes[ids[row]]
        past[:] = [*past[1:], float(rollout.correct[group].any())]
    return current[ids].astype(np.int32)


_LAST = ("prompts", "prompt_positions", "tokens", "mask", "logprobs")


@signal("class_scores")
def class_scores(context: Context) -> np.ndarray:
    """Running loss of each difficulty class, [C] (gdro).

    The losses of the last step's responses are those after its update: with the policy as it is
    now, and the unweighted advantages.
    """
    carried, rollout = context.carried, context.rollout
    scores = carried.get("gdro_scores", np.zeros(CLASSES, np.float32))
    seen = carried.get("gdro_seen", np.zeros(CLASSES, np.float32))
    if "gdro_last_tokens" in carried:
        last = {name: carried[f"gdro_last_{name}"] for name in _LAST}
        old, advantages = last.pop("logprobs"), carried["gdro_last_advantages"]
        blank = {"truncated": None, "group_ids": None, "records": [], "texts": []}
        then = Rollout(**last, logprobs=old, **blank)
        now = context.statistics("policy", ("logprobs",), then)["logprobs"]
        hyper = context.config.objective
        term = -clipped_surrogate(
            token_ratio(now, old, then.mask), advantages[:, None], hyper.clip_low, hyper.clip_high
        )
        row_losses = masked_mean(term, then.mask, axis=-1)
        scores, seen = gdro_update(scores, seen, row_losses, carried["gdro_last_classes"])
    old = context.statistics("policy", ("logprobs",))["logprobs"]
    kept = {name: getattr(rollout, name) for name in _LAST} | {
        "logprobs": old,
        "classes": context.once(_classes),
        "advantages": np.asarray(grpo_advantage(rollout.rewards, rollout.group_ids)),
    }
    carried.update({f"gdro_last_{name}": np.asarray(value) for name, value in kept.items()})
    carried["gdro_scores"], carried["gdro_seen"] = np.asarray(scores), np.asarray(seen)
    return carried["gdro_scores"]


def without_criterion(context: Context) -> np.ndarray:
    """The responses under prompts without their criterion, [B,T] (cort-rubric).

    Raises:
      ValueError: the task states no criterion.
    """
    records = context.rollout.records
    if "neutral" not in records[0].info:
        raise ValueError(
            f"The prompts of task {context.task.name!r} state no criterion that could be left out; "
            "use task.name=rubric."
        )
    neutral = [record.info["neutral"] for record in records]
    return context.rescore("policy", ("logprobs",), neutral)["logprobs"]
