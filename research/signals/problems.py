"""Signals of a task's problems over the whole run: pass rates and stored successes (drift)."""

import numpy as np

from research.signals import Context, signal
from research.signals.prompts import first_rows, prompt_ids, table

RATE = 0.3
"""Weight of the newest visit in a problem's pass rate."""
STORED = 4
"""Successes that are kept of each problem, the shortest ones."""


@signal("pass_rate")
def pass_rate(context: Context) -> np.ndarray:
    """Running pass rate of each row's problem, this step's responses included, [B] (drift)."""
    return context.once(_visited)[0]


@signal("demo_mask")
def demo_mask(context: Context) -> np.ndarray:
    """1 where a success of the row's problem is stored, [B] (drift)."""
    return np.array([s is not None for s in context.once(_visited)[1]], np.float32)


def stored(context: Context) -> list[str | None]:
    """A stored success of each row's problem, the shortest, or None."""
    return context.once(_visited)[1]


def _visited(context):
    """Takes the step's responses into both tables: rates [B] and successes of the rows."""
    rollout, ids = context.rollout, prompt_ids(context.rollout)
    rates = table(context, "pass_rates", [-1.0], ids)
    width = rollout.tokens.shape[1]
    kept = table(context, "successes", np.full(STORED * width, -1.0), ids)
    for row in first_rows(rollout):
        group, problem = rollout.group_ids == rollout.group_ids[row], ids[row]
        now = rollout.correct[group].mean()
        old = rates[problem, 0]
        rates[problem] = now if old < 0 else (1 - RATE) * old + RATE * now
        past = [tuple(t[t >= 0]) for t in kept[problem].reshape(STORED, width).astype(int)]
        new = [
            tuple(rollout.tokens[i][rollout.mask[i] > 0])
            for i in np.flatnonzero(group & (rollout.correct > 0))
        ]
        both = sorted({t for t in (*past, *new) if t}, key=lambda t: (len(t), t))[:STORED]
        padded = [[*t, *[-1] * (width - len(t))] for t in both]
        kept[problem] = np.full(STORED * width, -1.0)
        kept[problem, : len(both) * width] = np.ravel(padded)
    shown = []
    for problem in ids:
        first = kept[problem, :width].astype(int)
        text = context.tokenizer.decode(first[first >= 0].tolist())
        shown.append(text or None)
    return rates[ids, 0].copy(), shown
