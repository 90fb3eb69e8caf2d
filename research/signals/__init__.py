"""The signals table: how each array that a stage can ask for is made from a rollout.

A stage's signature names the arrays it reads; `collect` makes exactly those. Statistics of the
models (the policy at the start of the update, the reference, the teacher) are computed in one
forward pass per model, for the names that are asked for, and a model that nothing asks for is
never loaded.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from losses.catalogue import nearest
from research.rollouts import Rollout


@dataclasses.dataclass
class Context:
    """What signals are made from.

    Attributes:
      rollout: the responses and their grades.
      asked: names of the arrays and functions of the run's composition.
      statistics: (source, names, rollout=None) -> dict of arrays; source is "policy", "reference"
        or "teacher", names are keys of research.statistics.STATISTICS; of another rollout, if one
        is given.
      rescore: (source, names, prompts) -> dict of arrays: the same responses scored under other
        prompts, one text per row (rendered by the tokenizer like every prompt).
      respond: (records, ids, **settings) -> Rollout: further graded responses to task records, from
        the current sampler or another `source`; settings are those of the trainer's `respond`
        (group_size, temperature).
      measure: (function, source="policy", rollout=None, **rows) -> dict of arrays: what a function
        (model config, params, rows) makes of the responses' sequences in one pass over them. Its
        rows are "tokens" and "positions" [b,P+T], "mask" [b,T] and those given; it must be a
        function of a module, which is compiled once.
      continuations: (source, prompts, positions, group_size, salt) -> tokens and mask: further
        tokens sampled behind left-padded contexts.
      greedy_rewards: () -> [B] rewards of the greedy response to each row's prompt.
      carried: arrays that live from step to step and are checkpointed: what objectives returned
        after the last update (running baselines ...), and what signals keep (tables per prompt).
      config, task, tokenizer: of the run.
      step: steps done so far.
      memo: what several signals of this step share; see `once`.
    """

    rollout: Rollout
    asked: set[str]
    statistics: Callable[..., Mapping[str, np.ndarray]]
    rescore: Callable[..., Mapping[str, np.ndarray]]
    respond: Callable[..., Rollout]
    measure: Callable[..., Mapping[str, np.ndarray]]
    continuations: Callable[..., Mapping[str, np.ndarray]]
    greedy_rewards: Callable[[], np.ndarray]
    carried: dict[str, Any]
    config: Any
    task: Any
    tokenizer: Any
    step: int
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def once(self, make: Callable[["Context"], Any]) -> Any:
        """Returns make(self), made once a step."""
        if make not in self.memo:
            self.memo[make] = make(self)
        return self.memo[make]


MODEL_SIGNALS = {
    # Stages before the objective see the policy as it is when the update starts.
    "logprobs": ("policy", "logprobs"),
    "entropy": ("policy", "entropy"),
    "values": ("policy", "values"),
    "logits": ("policy", "logits"),
    "old_logprobs": ("policy", "logprobs"),
    "old_entropy": ("policy", "entropy"),
    "old_values": ("policy", "values"),
    "old_logits": ("policy", "logits"),
    "ref_logprobs": ("reference", "logprobs"),
    "ref_logits": ("reference", "logits"),
    "teacher_logprobs": ("teacher", "logprobs"),
    "teacher_logits": ("teacher", "logits"),
    "reward_logprobs": ("teacher", "logprobs"),  # of a policy trained by preferences
    "teacher_base_logprobs": ("teacher_base", "logprobs"),
    "reverse_logits": ("reverse", "logits"),
    "hidden": ("policy", "hidden"),
    "mtp_logprobs": ("policy", "mtp_logprobs"),
    "old_mtp_logprobs": ("policy", "mtp_logprobs"),
}
"""Signal -> (model, statistic)."""

SIGNALS: dict[str, Callable[[Context], np.ndarray]] = {
    "tokens": lambda c: c.rollout.tokens,
    "mask": lambda c: c.rollout.mask,
    "sampler_logprobs": lambda c: c.rollout.logprobs,
    "rewards": lambda c: c.rollout.rewards,
    "reward_components": lambda c: np.stack(list(c.rollout.components.values()), axis=1),
    "group_ids": lambda c: c.rollout.group_ids,
    "lengths": lambda c: c.rollout.mask.sum(1).astype(np.int32),
    "truncated": lambda c: c.rollout.truncated.astype(np.float32),
    "correct": lambda c: c.rollout.correct,
    "token_rewards": lambda c: outcome_on_last_token(c.rollout),
    "greedy_rewards": lambda c: c.greedy_rewards(),
}
"""Signal -> how it is made."""


SPECIAL: dict[tuple[str, str], Callable[[Context], np.ndarray]] = {}
"""(signal, what asks for it) -> how it is made there instead."""

SEQUENCES: dict[str, Callable[[Context], Rollout]] = {}
"""Differentiable log-probabilities of other sequences than the responses -> those sequences."""

_MODELS: dict[Callable, tuple[str, ...]] = {}


def signal(name: str, given: str | None = None, models: Sequence[str] = ()) -> Callable:
    """Adds a signal to the table: `@signal("uncertainty") def _(context): ...`.

    Args:
      name: of the array.
      given: makes it so only in compositions that ask for this array or have this function: papers
        use one name for different things.
      models: "reference" or "teacher", where the function uses them.
    """

    def add(function):
        if given is None:
            SIGNALS[name] = function
        else:
            SPECIAL[name, given] = function
        _MODELS[function] = (*_MODELS.get(function, ()), *models)
        return function

    return add


def _maker(name: str, asked: set[str]) -> Callable[[Context], np.ndarray] | None:
    for (special, given), function in SPECIAL.items():
        if special == name and given in asked:
            return function
    return SIGNALS.get(name)


def random_state(context: Context, salt: int) -> np.random.Generator:
    """The source of randomness of a signal at this step: a function of seed, step and salt."""
    return np.random.default_rng((context.config.seed, context.step, salt))


def outcome_on_last_token(rollout: Rollout) -> np.ndarray:
    """The outcome reward on the last token of each response, [B,T]."""
    dense = np.zeros_like(rollout.mask)
    last = rollout.mask.shape[1] - 1 - np.argmax(rollout.mask[:, ::-1], axis=1)
    dense[np.arange(len(last)), last] = rollout.rewards
    return dense * rollout.mask


def check(needs: Sequence[str], asked: Sequence[str] = ()) -> None:
    """Raises an error, before any work, if a needed array is in no table.

    Raises:
      ValueError: names the array and the nearest ones that can be supplied.
    """
    known = {*SIGNALS, *MODEL_SIGNALS, *SEQUENCES}
    for name in needs:
        if name not in known and _maker(name, set(asked)) is None:
            raise ValueError(
                f"The trainer has no signal {name!r}.{nearest(name, sorted(known))} "
                "Add one with research.signals.signal, or call the function on arrays of your own."
            )


def sources(needs: Sequence[str], asked: Sequence[str] = ()) -> set[str]:
    """Returns the models that a set of needs asks for, beside the policy."""
    found = set()
    for name in needs:
        maker = _maker(name, set(asked))
        if maker is not None:
            found.update(_MODELS.get(maker, ()))
        elif name in MODEL_SIGNALS:
            found.add(MODEL_SIGNALS[name][0])
    return found - {"policy"}


def collect(needs: Sequence[str], context: Context) -> dict[str, np.ndarray]:
    """Makes the named arrays, each model run once for all that is asked of it."""
    out = {}
    asked: dict[str, list[str]] = {}
    for name in needs:
        maker = _maker(name, context.asked)
        if name in context.carried:
            out[name] = context.carried[name]
        elif maker is not None:
            out[name] = maker(context)
        else:
            source, statistic = MODEL_SIGNALS[name]
            asked.setdefault(source, []).append(statistic)
    found = {s: context.statistics(s, sorted(set(names))) for s, names in asked.items()}
    for name in needs:
        if name not in out:
            source, statistic = MODEL_SIGNALS[name]
            out[name] = found[source][statistic]
    return out


# The modules below add their signals to the tables above.
from research.signals import (  # noqa: E402, F401
    chunks,
    contexts,
    criteria,
    edits,
    feedback,
    learned,
    preferences,
    problems,
    prompts,
    rescored,
    sampling,
    states,
    steps,
    turns,
)
