"""Hyperparameters that change from step to step.

A hyperparameter set to "run.NAME" is a schedule of this table; "last.METRIC" is what the last
update logged under that name. Both reach the compiled functions as traced numbers.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

import losses
from losses.catalogue import is_bound, nearest
from losses.distillation.tt_opd import phased_out
from losses.regularizers.epo import smoothing_weight

SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "step": lambda step, steps: step,
    "steps": lambda step, steps: steps,
    "progress": lambda step, steps: step / steps,
    # TurnOPD: from 0 to 1 over the first half.
    "ramp": lambda step, steps: min(2 * step / steps, 1.0),
    # ADRS: nothing for 20 steps, then 50 active ones, of 150; here the same shares of the run.
    "window": lambda step, steps: 0.02 * (2 / 15 <= step / steps < 7 / 15),
    "smoothing_weight": lambda step, steps: smoothing_weight(step + 1, steps),
    # TT-OPD: full strength for a third of the run, gone at two thirds.
    "phased_out": lambda step, steps: phased_out(step, start=steps / 3, end=2 * steps / 3),
}
"""Name -> function of (step from 0, steps of the run)."""


def bound_names(stages: Sequence[losses.Stage]) -> tuple[str, ...]:
    """Returns the "run." and "last." names among the hyperparameters of some stages.

    Raises:
      ValueError: "run.NAME" is not a schedule; names the nearest one.
    """
    values = [v for stage in stages for v in stage.settings.values()]
    names = tuple(dict.fromkeys(v for v in values if is_bound(v)))
    for name in names:
        kind, _, which = name.partition(".")
        if kind == "run" and which not in SCHEDULES:
            raise ValueError(
                f"Unknown schedule {name!r}.{nearest(which, list(SCHEDULES))} "
                f"Known: {', '.join(f'run.{s}' for s in SCHEDULES)}; last.METRIC."
            )
    return names


def values(
    names: Sequence[str], step: int, steps: int, logged: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Returns the numbers behind bound names at a step.

    Args:
      names: from `bound_names`.
      step, steps: of the run.
      logged: what the last step logged; a metric that it lacks (before the first step) is 0.
    """

    def value(name):
        kind, _, which = name.partition(".")
        return SCHEDULES[which](step, steps) if kind == "run" else logged.get(which, 0.0)

    return {name: np.float32(value(name)) for name in names}
