"""What a run leaves behind: metrics as lines of JSON and for TensorBoard, a picture, a table."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

METRICS_FILE = "metrics.jsonl"
PICTURE_FILE = "report.png"

PANELS = (
    ("Reward", ("reward",)),
    ("Accuracy", ("accuracy", "eval/greedy", "eval/pass@1", "eval/pass@8", "eval/majority@8")),
    ("Entropy (nats)", ("entropy",)),
    ("KL (nats)", ("approx_kl", "kl", "ref_kl", "sampler_kl")),
    ("Response length (tokens)", ("length",)),
    ("Clip fraction", ("clip_fraction",)),
)
"""Axis label -> the metrics it shows, as far as the run recorded them."""


class MetricsWriter:
    """Appends scalars to `metrics.jsonl` and to TensorBoard event files in a run's directory.

    A run that continues from a checkpoint of step s passes `last_step=s`: what the killed run
    wrote after it is dropped, so that no step stands twice.
    """

    def __init__(self, workdir: str | Path, last_step: int = -1):
        from tensorboardX import SummaryWriter

        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS_FILE
        kept = [record for record in _records(path) if record["step"] <= last_step]
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(scratch, path)  # at no moment is the file half written
        self._file = path.open("a", buffering=1)
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=last_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars of a step; a step may be written in several calls.

        Args:
          step: not before an earlier one.
          metrics: name -> scalar: a number or an array of one element. NaN and infinities are
            written as null, which is valid JSON, and read back as NaN.

        Raises:
          ValueError: a value is not a scalar, with its name.
        """
        values = {}
        for name, value in metrics.items():
            array = np.asarray(value)
            if array.size != 1 or array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
                raise ValueError(f"Metric {name!r} is not a scalar: {value!r}.")
            values[name] = float(array.item())
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._file.write(json.dumps({"step": int(step), **finite}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        self._file.close()
        self._board.close()


def _records(path: Path) -> list[dict]:
    records = []
    if path.is_file():
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number < len(lines):
                    raise ValueError(f"{path}, line {number}: {error}") from None
                # The last line of a run that was killed while it wrote.
    return records


def read_metrics(workdir: str | Path) -> list[dict[str, float]]:
    """Reads the metrics of a run.

    Args:
      workdir: the run's directory.

    Returns:
      One dict per step, in order, with "step" and every scalar written at it. (Ready for
      `pandas.DataFrame`.)

    Raises:
      FileNotFoundError: the directory has no metrics.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"No {METRICS_FILE} in {str(workdir)!r}; is it a run's directory?")
    steps: dict[int, dict[str, float]] = {}
    for record in _records(path):
        values = {k: math.nan if v is None else v for k, v in record.items()}
        steps.setdefault(record["step"], {}).update(values)
    return [steps[step] for step in sorted(steps)]


def series(records: list[dict[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, values) of one metric, where it was recorded."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return np.array([p[0] for p in points]), np.array([p[1] for p in points], np.float64)


def report_picture(workdir: str | Path, title: str = "") -> Path:
    """Draws a run: reward, accuracy, entropy, KL, length and clip fraction over the steps.

    Metrics of every step are drawn as a faint line with its moving average on top; those of
    evaluations as points.

    Args:
      workdir: the run's directory.
      title: of the picture; the directory's name if empty.

    Returns:
      The path of the PNG in the run's directory.

    Raises:
      FileNotFoundError: the directory has no metrics.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workdir = Path(workdir)
    records = read_metrics(workdir)
    # A figure of its own instead of pyplot's: the backend of a notebook stays as it is.
    figure = Figure(figsize=(12, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3, sharex=True)
    for panel, (axis, (label, names)) in enumerate(zip(axes.flat, PANELS)):
        recorded = [name for name in names if len(series(records, name)[0])]
        for colour, name in enumerate(recorded):
            _draw(axis, *series(records, name), name, f"C{colour}")
        axis.set_title(label, fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
        if recorded:
            axis.grid(alpha=0.25)
        else:
            axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color="0.5")
            axis.set_yticks([])
        if len(recorded) > 1:
            axis.legend(frameon=False, fontsize=9)
        if panel == 1:  # rates share one scale, so that runs compare at a glance
            axis.set_ylim(-0.02, 1.02)
        if panel >= 3:
            axis.set_xlabel("step")
    figure.suptitle(title or workdir.name, fontsize=14)
    path = workdir / PICTURE_FILE
    figure.savefig(path)
    return path


def _draw(axis, steps, values, name, colour):
    label = name.removeprefix("eval/")
    if name.startswith("eval/"):
        axis.plot(steps, values, "o-", color=colour, markersize=4, linewidth=1.5, label=label)
        return
    window = max(1, len(values) // 20)
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), np.ones(window))[: len(values)]
    counts = np.convolve(finite, np.ones(window))[: len(values)]
    smooth = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0.5)
    if window > 1:
        axis.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    axis.plot(steps, smooth, color=colour, linewidth=1.8, label=label)


def final_table(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Returns a text table of an evaluation before and after training.

    Args:
      before: from `evaluation.summary`, before the first step.
      after: the same, after the last.

    Returns:
      A line per metric that both have: before, after, change.
    """
    names = [name for name in before if name in after and name not in ("prompts", "samples")]
    width = max(map(len, ("held-out", *names)))
    lines = [f"{'held-out':<{width}}  {'before':>8}  {'after':>8}  {'change':>8}"]
    lines.append("-" * len(lines[0]))
    for name in names:
        old, new = float(before[name]), float(after[name])
        digits = 1 if name == "length" else 3
        lines.append(
            f"{name:<{width}}  {old:>8.{digits}f}  {new:>8.{digits}f}  {new - old:>+8.{digits}f}"
        )
    if "prompts" in after and "samples" in after:
        lines.append(f"{after['prompts']} prompts, {after['samples']} samples each")
    return "\n".join(lines)
