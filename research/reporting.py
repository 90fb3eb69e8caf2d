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
    ("Reward", {"reward": "reward"}),
    (
        "Accuracy",
        {
            "accuracy": "training samples",
            "eval/greedy_accuracy": "held-out, greedy",
            "eval/pass@*": "held-out, pass@*",
            "eval/majority@*": "held-out, majority@*",
        },
    ),
    ("Entropy (nats)", {"entropy": "entropy"}),
    ("KL (nats per token)", {"kl": "to the reference", "approx_kl": "old to new policy"}),
    ("Response length (tokens)", {"length": "length"}),
    ("Clip fraction", {"clip_fraction": "clip fraction"}),
)
"""Title -> {metric: label} of what a panel shows, as far as the run recorded it; * is any k."""


class MetricsWriter:
    """Appends scalars to `metrics.jsonl` and to TensorBoard event files in a run's directory.

    The first step written is where the run begins: what an earlier run left at that step or after
    is dropped. A run that continues calls `truncate` with the step of its checkpoint, so that what
    the killed run wrote after it does not stand twice.
    """

    def __init__(self, workdir: str | Path):
        self._workdir = Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._file = self._board = None

    def truncate(self, step: int) -> None:
        """Drops what was written after a step."""
        from tensorboardX import SummaryWriter

        self.close()
        path = self._workdir / METRICS_FILE
        kept = [record for record in _records(path) if record["step"] <= step]
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(scratch, path)  # at no moment is the file half written
        self._file = path.open("a", buffering=1)
        board = str(self._workdir / "tensorboard")
        self._board = SummaryWriter(board, purge_step=step + 1)  # TensorBoard hides the rest

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
        if self._file is None:
            self.truncate(step - 1)
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._file.write(json.dumps({"step": int(step), **finite}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is not None:
            self._file.close()
            self._board.close()
            self._file = self._board = None


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
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    axes = figure.subplots(2, 3, sharex=True)
    for panel, (axis, (heading, names)) in enumerate(zip(axes.flat, PANELS)):
        recorded = _recorded(records, names)
        for colour, (name, label) in enumerate(recorded.items()):
            sparse = name.startswith("eval/")
            _draw(axis, *series(records, name), label, f"C{colour}", sparse)
        axis.set_title(heading, fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
        if recorded:
            axis.grid(alpha=0.25)
        else:
            axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color="0.5")
            axis.set_yticks([])
        if panel == 1:  # rates share one scale, so that runs compare at a glance
            axis.set_ylim(-0.02, 1.02)
        if len(recorded) > 1 or heading.startswith("KL"):  # of which policies?
            axis.legend(frameon=False, fontsize=8, ncols=min(len(recorded), 2))
        if panel >= 3:
            axis.set_xlabel("step")
    figure.suptitle(title or workdir.name, fontsize=14)
    path = workdir / PICTURE_FILE
    figure.savefig(path)
    return path


def _recorded(records, names):
    """{metric: label} of the metrics of a panel that the run recorded."""
    seen = dict.fromkeys(name for record in records for name in record)
    found = {}
    for pattern, label in names.items():
        stem, star, _ = pattern.partition("*")
        for name in seen:
            if name == pattern or star and name.startswith(stem):
                found[name] = label.replace("*", name.removeprefix(stem))
    return found


def _draw(axis, steps, values, label, colour, sparse):
    if sparse:
        axis.plot(steps, values, "o-", color=colour, markersize=4, linewidth=1.5, label=label)
        return
    window = max(1, len(values) // 10)
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
        lines.append(f"{after['prompts']:.0f} prompts, {after['samples']:.0f} samples each")
    return "\n".join(lines)
