"""Finds rewards by name, grades a batch, and says which reward failed on what."""

import functools
import importlib
import importlib.util
import inspect
import logging
import math
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from losses.catalogue import nearest
from research.rewards import functions, mathematics
from research.tasks.base import Record

REWARDS = {
    "exact": functions.exact,
    "numeric": functions.numeric,
    "math_verify": mathematics.math_verify,
    "format": functions.format_reward,
    "length": functions.length_penalty,
    "chain": functions.chain,
    "countdown": functions.countdown,
    "reasoning_gym": functions.reasoning_gym,
}
"""Name -> function."""


class RewardError(ValueError):
    """A reward that does not exist, or that failed on a response."""


@functools.cache
def find_reward(name: str) -> Callable[..., float]:
    """Returns a reward function.

    Args:
      name: one of `REWARDS`, `module:function`, or `path/to/file.py:function`.

    Returns:
      reward(response, record, **parameters) -> number.

    Raises:
      RewardError: there is none, with the nearest name.
    """
    if name in REWARDS:
        return REWARDS[name]
    source, colon, attribute = name.rpartition(":")
    if not colon:
        raise RewardError(
            f"Unknown reward {name!r}.{nearest(name, list(REWARDS))} Rewards: "
            f"{', '.join(REWARDS)}; your own: module:function or file.py:function."
        )
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardError(
            f"{source} has no function {attribute!r}.{nearest(attribute, there)} "
            f"Its functions: {', '.join(there) or 'none'}."
        )
    return function


def _load_file(path: str):
    if not Path(path).is_file():
        there = [str(p) for p in Path(path).parent.glob("*.py")]
        raise RewardError(f"No reward file {path!r} in {Path.cwd()}.{nearest(path, there)}")
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


def _load_module(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RewardError(f"Cannot import {name!r} for a reward: {error}.") from error


def _resolve(spec: Mapping[str, Any]) -> list[tuple[str, str, float, dict[str, Any]]]:
    """(name, function's name, weight, parameters) of each entry of a spec, checked."""
    if not spec:
        raise RewardError("No rewards: give a name and a weight, such as {'exact': 1.0}.")
    resolved = []
    for name, entry in spec.items():
        parameters = dict(entry.items()) if hasattr(entry, "items") else {"weight": entry}
        weight = parameters.pop("weight", 1.0)
        source = parameters.pop("function", name)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise RewardError(f"Reward {name!r} has weight {weight!r}; expected a number.")
        _check_parameters(name, find_reward(source), parameters)
        resolved.append((name, source, float(weight), parameters))
    return resolved


def _check_parameters(name, function, parameters):
    signature = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in signature.values()):
        return
    known = list(signature)[2:]
    for key in parameters:
        if key not in known:
            raise RewardError(
                f"Reward {name!r} has no parameter {key!r}.{nearest(key, known)} "
                f"It takes: {', '.join(known) or 'none'}."
            )


def worker_pool(processes: int) -> ProcessPoolExecutor:
    """Returns processes that grade in parallel, for slow rewards; shut it down after use.

    They are started anew rather than forked, since forking a process that runs JAX can deadlock:
    a script that uses this needs an `if __name__ == "__main__":` guard.
    """
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))


def grade(
    responses: Sequence[str],
    records: Sequence[Record],
    spec: Mapping[str, Any],
    *,
    on_error: str = "stop",
    pool: Executor | None = None,
) -> dict[str, Any]:
    """Grades responses by a weighted sum of rewards.

        total_i = sum_r weight_r reward_r(response_i, record_i)

    Args:
      responses: B texts.
      records: B records; responses to one prompt share theirs.
      spec: name -> weight, or name -> {"weight": 1.0, "function": ..., **parameters}. The function
        (by default the name) is one of `REWARDS`, `module:function` or `file.py:function`.
      on_error: "stop" raises at the first reward that fails; "zero" gives that response 0 for it.
      pool: from `worker_pool`, or None to grade in this process.

    Returns:
      {"total": float32 [B], "components": name -> float32 [B] (unweighted), "errors": name ->
      number of failures}.

    Raises:
      RewardError: an unknown reward or parameter; or, with on_error="stop", a reward that raised,
        or returned anything but a finite number.
    """
    if on_error not in ("stop", "zero"):
        raise RewardError(
            f"on_error={on_error!r}; expected 'stop' or 'zero'."
            f"{nearest(on_error, ['stop', 'zero'])}"
        )
    if len(responses) != len(records):
        raise RewardError(f"{len(responses)} responses for {len(records)} records.")
    total = np.zeros(len(responses), np.float64)
    components, errors = {}, {}
    for name, source, weight, parameters in _resolve(spec):
        score = functools.partial(_score, source, parameters)
        if pool is None:
            outcomes = map(score, responses, records)
        else:
            outcomes = pool.map(score, responses, records, chunksize=8)
        values = np.zeros(len(responses), np.float64)
        errors[name] = 0
        for index, (value, problem) in enumerate(outcomes):
            if problem is None:
                values[index] = value
                continue
            message = _failure(name, problem, responses[index], records[index])
            if on_error == "stop":
                raise RewardError(message)
            if not errors[name]:  # once a batch is enough to see what it is
                logging.warning("Counted as 0: %s", message)
            errors[name] += 1
        components[name] = values.astype(np.float32)
        total += weight * values
    return {"total": total.astype(np.float32), "components": components, "errors": errors}


def _score(source, parameters, response, record) -> tuple[float, str | None]:
    """(value, None), or (0, what went wrong): text, because not every exception can be pickled."""
    try:
        value = find_reward(source)(response, record, **parameters)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"raised {type(error).__name__}: {error} (at {where.filename}:{where.lineno})"
        return 0.0, text
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        return 0.0, f"returned {value!r}, not a finite number,"
    return number, None


def _failure(name, problem, response, record):
    return (
        f"Reward {name!r} {problem} for the response {_shorten(response)} to the prompt "
        f"{_shorten(record.prompt)} (record {record.id}, reference {_shorten(record.answer)}). "
        "Mend the reward, or set on_error to 'zero' to count such responses as 0."
    )


def _shorten(text: str, limit: int = 300) -> str:
    half = limit // 2
    return repr(text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}")
