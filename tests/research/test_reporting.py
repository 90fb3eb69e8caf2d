"""Metrics survive a killed run; the picture and the table say what was measured."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from research.reporting import (
    METRICS_FILE,
    MetricsWriter,
    final_table,
    read_metrics,
    report_picture,
    series,
)


def write(workdir, steps, value, truncate=None):
    writer = MetricsWriter(workdir)
    if truncate is not None:
        writer.truncate(truncate)
    for step in steps:
        writer.write(step, {"reward": value})
    writer.close()


def test_metrics_round_trip_and_merge_by_step(tmp_path):
    writer = MetricsWriter(tmp_path / "run")
    writer.write(0, {"eval/pass@1": np.float32(0.25)})
    writer.write(1, {"reward": jnp.float32(0.5), "kl": math.nan})
    writer.write(1, {"eval/pass@1": 1})
    writer.close()
    first, second = read_metrics(tmp_path / "run")
    assert first == {"step": 0, "eval/pass@1": 0.25}
    assert second["reward"] == 0.5 and second["eval/pass@1"] == 1.0 and math.isnan(second["kl"])
    text = (tmp_path / "run" / METRICS_FILE).read_text()
    assert "NaN" not in text and all(json.loads(line) for line in text.splitlines())
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    steps, values = series([first, second], "eval/pass@1")
    assert steps.tolist() == [0, 1] and values.tolist() == [0.25, 1.0]


def test_a_continued_run_drops_what_was_written_after_its_checkpoint(tmp_path):
    write(tmp_path, range(6), 1.0)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 6, "rew')  # killed while writing
    write(tmp_path, [3, 4], 2.0, truncate=2)
    found = [(r["step"], r["reward"]) for r in read_metrics(tmp_path)]
    assert found == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_run_that_starts_over_replaces_the_old_record(tmp_path):
    write(tmp_path, range(6), 1.0)
    write(tmp_path, range(2), 2.0)
    assert [(r["step"], r["reward"]) for r in read_metrics(tmp_path)] == [(0, 2.0), (1, 2.0)]


def test_bad_metrics_and_directories_are_named(tmp_path):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match="Metric 'entropy' is not a scalar"):
        writer.write(0, {"entropy": np.zeros(3)})
    with pytest.raises(FileNotFoundError, match="is it a run's directory"):
        read_metrics(tmp_path / "nowhere")
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\nrubbish\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def test_picture_shows_what_was_recorded(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    labels = []
    plot = Axes.plot

    def recording(self, *args, **kwargs):
        labels.append(kwargs.get("label"))
        return plot(self, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", recording)
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"eval/pass@4": 0.5, "eval/prompts": 9})
    for step in range(1, 45):
        writer.write(step, {"reward": step / 45, "kl": math.nan if step == 3 else 0.1})
    writer.close()
    path = report_picture(tmp_path, title="a run")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert [label for label in labels if label] == [
        "reward",
        "held-out, pass@4",
        "to the reference",
    ]


def test_final_table():
    before = {"pass@1": 0.25, "length": 3.0, "only": 1.0, "prompts": 128.0, "samples": 8.0}
    after = {"pass@1": 0.8, "length": 2.5, "prompts": 128.0, "samples": 8.0}
    lines = final_table(before, after).splitlines()
    assert lines[0].split() == ["held-out", "before", "after", "change"]
    assert lines[2].split() == ["pass@1", "0.250", "0.800", "+0.550"]
    assert lines[3].split() == ["length", "3.0", "2.5", "-0.5"]
    assert lines[4:] == ["128 prompts, 8 samples each"]
