"""The loop under stress: kills, damage, failing rewards, non-finite gradients, other layouts."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import research
from research import reporting
from research.config import ConfigError
from research.loop import Trainer, opened, run
from research.rewards import RewardError
from research.selection import PromptOrder
from tests.launch.test_papers_train import SMALL

ROOT = Path(__file__).parents[2]
TIMES = ("seconds", "tokens_per_second")
STALE = {"staleness": 2, "update.minibatches": 2, "ema": 0.9, "sampler_noise": 0.05}


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved on the way out."""


def config(workdir, paper="dynamic-sampling", **overrides):
    paths = {k.replace("__", "."): v for k, v in overrides.items()}
    return research.build(paper, overrides={**SMALL, "workdir": str(workdir), **paths})


def quiet(_):
    pass


def scalars(history):
    return [{k: v for k, v in m.items() if k not in TIMES} for m in history]


def assert_same_run(found, expected):
    np.testing.assert_equal(scalars(found.history), scalars(expected.history))
    np.testing.assert_equal(found.after, expected.after)
    np.testing.assert_equal(found.before, expected.before)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(a, b)


# -- stop and resume -------------------------------------------------------------------------------

LONG = {
    **STALE,
    "steps": 6,
    "evaluation.prompts": 8,
    "evaluation.samples": 2,
    "evaluation.every": 4,
    "checkpoint.every": 2,
}


def long_config(workdir):
    return config(workdir, **LONG)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A whole run, its compilations after each step, and its parameters before each step."""
    compilations, counts, seen = [], [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compilations.append(name) if "backend_compile" in name else None
    )
    result = run(
        long_config(tmp_path_factory.mktemp("whole")),
        log=quiet,
        on_step=lambda logged: (counts.append(len(compilations)), seen.append(logged)),
    )
    return result, counts, seen


def test_nothing_is_compiled_after_the_second_step(uninterrupted):
    """Evaluations included: the one before the first step has compiled what they need."""
    result, counts, seen = uninterrupted
    assert len(counts) == 6 and counts[0] > 0
    assert any("eval/greedy_accuracy" in logged for logged in seen)
    assert counts[1:] == [counts[1]] * 5


def test_the_metrics_file_holds_what_was_logged(uninterrupted):
    result, _, seen = uninterrupted
    written = {m["step"]: m for m in reporting.read_metrics(result.workdir)}
    for step, logged in enumerate(seen, 1):
        assert {k: written[step][k] for k in logged} == logged
    assert {k: written[0][f"eval/{k}"] for k in result.before} == result.before
    assert {k: written[6][f"eval/{k}"] for k in result.after} == result.after


@pytest.mark.parametrize(
    "after, error", [([1], Killed), ([3, 4], Killed), ([2, 5], KeyboardInterrupt)]
)
def test_a_stopped_run_continues_exactly(after, error, uninterrupted, tmp_path):
    """Killed after some steps, once a resumed run again: with what was saved, or since step 0."""

    def stop_at(step):
        def on_step(logged):
            if len(reached) + 1 == step:
                raise error
            reached.append(step)

        reached = list(range(saved_step(tmp_path)))
        return on_step

    for step in after:
        with pytest.raises(error):
            run(long_config(tmp_path), log=quiet, on_step=stop_at(step))
        if error is KeyboardInterrupt:
            assert saved_step(tmp_path) == step
    found = run(long_config(tmp_path), log=quiet)
    assert_same_run(found, uninterrupted[0])
    found = reporting.read_metrics(tmp_path)
    np.testing.assert_equal(
        scalars(found), scalars(reporting.read_metrics(uninterrupted[0].workdir))
    )


def saved_step(workdir):
    """The last step that has a checkpoint."""
    return max([int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*")], default=0)


def test_a_finished_run_is_not_trained_further(uninterrupted, tmp_path):
    run(long_config(tmp_path), log=quiet)
    again = run(long_config(tmp_path), log=quiet, on_step=lambda _: pytest.fail("took a step"))
    assert_same_run(again, uninterrupted[0])


def train_process(workdir):
    settings = {**SMALL, **LONG, "workdir": workdir}
    command = [sys.executable, "-m", "launch.train", "--paper=dynamic-sampling"]
    return subprocess.Popen(
        [*command, *(f"--config.{k}={v}" for k, v in settings.items())],
        cwd=ROOT,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_killed_at_any_moment_continues_exactly(uninterrupted, tmp_path):
    """SIGKILL, twice, a random time after the process has begun to take steps."""
    moment = random.Random(0)
    for _ in range(2):
        process = train_process(tmp_path)
        for line in process.stdout:
            if line.startswith(("step", "resumed")):
                break
        time.sleep(moment.random() / 2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = train_process(tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    found = reporting.read_metrics(tmp_path)
    expected = reporting.read_metrics(uninterrupted[0].workdir)
    assert len(found) == len(expected) == 7
    np.testing.assert_equal(scalars(found), scalars(expected))


# -- damage and mistakes ---------------------------------------------------------------------------


def damaged(path, how):
    files = sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        if how == "missing":
            file.unlink()
        elif how == "truncated":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(how, uninterrupted, tmp_path):
    def stop(logged):
        if "eval/greedy_accuracy" in logged:
            raise KeyboardInterrupt  # at step 4, saved on the way out; step 2 is there too

    with pytest.raises(KeyboardInterrupt):
        run(long_config(tmp_path), log=quiet, on_step=stop)
    assert saved_step(tmp_path) == 4
    damaged(tmp_path / "checkpoints" / "4", how)
    logs = []
    found = run(long_config(tmp_path), log=logs.append)
    assert any("checkpoints/4 cannot be read" in line for line in logs)
    assert any(line.startswith("resumed from step 2") for line in logs)
    assert_same_run(found, uninterrupted[0])


def test_no_readable_checkpoint_is_an_error_that_removes_nothing(tmp_path):
    few = config(tmp_path, "grpo", steps=1)
    run(few, log=quiet)
    damaged(tmp_path / "checkpoints" / "1", "truncated")
    with pytest.raises(ConfigError, match=r"None of the checkpoints .* \(steps 1\)"):
        run(few, log=quiet)
    assert (tmp_path / "checkpoints" / "1").exists()


def test_a_directory_of_another_config_is_refused(tmp_path):
    run(config(tmp_path, "grpo", steps=1), log=quiet)
    before = (tmp_path / "config.json").read_text()
    other = config(tmp_path, "grpo", group_size=2)
    other.objective.clip_high = 0.3
    with pytest.raises(ConfigError) as caught:
        run(other, log=quiet)
    for text in ("group_size: 4 -> 2", "objective.clip_high: 0.2 -> 0.3", str(tmp_path)):
        assert text in str(caught.value)
    assert "steps" not in str(caught.value)
    assert (tmp_path / "config.json").read_text() == before


FAILING = '''
"""A reward that fails from its {start}th call on, in some way, until it is mended."""
calls = 0

def graded(response, record):
    global calls
    calls += 1
    if calls > {start}:
        {failure}
    return float(response.strip() == record.answer)
'''


@pytest.mark.parametrize(
    "failure, words",
    [
        ("raise KeyError('unit')", "raised KeyError: 'unit'"),
        ("return float('nan')", "returned nan, not a finite number"),
    ],
)
def test_a_failing_reward_stops_with_a_checkpoint(failure, words, tmp_path):
    reward = tmp_path / "graded.py"
    source = f"{reward}:graded"

    def settings(name, **more):
        made = config(tmp_path / name, "grpo", steps=4, **more)
        made.rewards = {"own": {"function": source, "weight": 2.0}}
        return made

    def write(failure, start):
        research.rewards.find_reward.cache_clear()
        reward.write_text(FAILING.format(failure=failure, start=start))

    write("pass", 0)
    expected = run(settings("whole"), log=quiet)
    batch = 16
    write(failure, start=2 * batch + 5)  # in the third of four steps
    with pytest.raises(RewardError) as caught:
        run(settings("failed"), log=quiet)
    message = str(caught.value)
    assert "\n" not in message and "'own'" in message and words in message
    assert "to the prompt '" in message and "(record " in message and "reference '" in message
    assert saved_step(tmp_path / "failed") == 2
    write("pass", 0)
    assert_same_run(run(settings("failed"), log=quiet), expected)

    write(failure, start=2 * batch + 5)
    counted = run(settings("zero", on_reward_error="zero"), log=quiet)
    assert [m["reward_errors"] for m in counted.history] == [0, 0, batch - 5, batch]
    assert counted.history[3]["reward"] == 0 and counted.history[3]["reward/own"] == 0


# -- non-finite gradients --------------------------------------------------------------------------


def spoiled(bad):
    """A loss that is not finite on minibatches for which `bad` says so, by their first tokens."""

    def loss(logprobs, mask, advantages):
        spoil = jax.numpy.where(bad(mask), jax.numpy.nan, 1.0)
        return -(logprobs * mask * advantages).sum() / mask.sum() * spoil, {}

    return loss


def test_a_run_that_only_skips_stops_with_a_checkpoint(tmp_path):
    settings = config(tmp_path, "grpo", steps=9, max_skipped=4, update__minibatches=2, ema=0.9)
    with pytest.raises(RuntimeError) as caught:
        run(settings, objective=spoiled(lambda mask: True), log=quiet)
    assert "4 consecutive updates had a non-finite loss or gradient" in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    assert saved_step(tmp_path) == 2
    assert [m["skipped"] for m in reporting.read_metrics(tmp_path) if m["step"]] == [1.0, 1.0]


def test_single_skips_are_counted_and_do_not_stop(tmp_path):
    """Some updates are skipped, others not; the parameters stay finite."""
    settings = config(tmp_path, "grpo", steps=4, update__minibatches=2)
    result = run(settings, objective=spoiled(lambda mask: mask.sum() % 2 == 0), log=quiet)
    skipped = [m["skipped"] for m in result.history]
    assert 0 < sum(skipped) < 4, skipped
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.params))


# -- layouts ---------------------------------------------------------------------------------------

LAYOUTS = [{"devices": 2}, {"devices": 8}, {"mesh": "data:2,fsdp:2,tensor:2"}]


def close(found, expected, tolerance):
    for a, b in zip(scalars(found.history), scalars(expected.history), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], tolerance, tolerance, err_msg=name)


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    return run(config(tmp_path_factory.mktemp("alone"), "dapo", **STALE), log=quiet)


def warmed(workdir, alone, **change):
    """The config of the same run in another layout, behind the same warm-up."""
    # Many updates at a high rate would blow up the rounding in which layouts differ.
    shutil.copytree(alone.workdir / "initial", workdir / "initial")
    return config(workdir, "dapo", **STALE, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"update.microbatches": 2},
        LAYOUTS[0],
        pytest.param(LAYOUTS[1], marks=pytest.mark.slow),
        LAYOUTS[2],
    ],
)
def test_training_is_the_same_in_any_layout(change, trained_alone, tmp_path):
    """Metrics and parameters, over steps with stale, noisy samplers and averaged parameters."""
    found = run(warmed(tmp_path, trained_alone, **change), log=quiet)
    close(found, trained_alone, 1e-4)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(trained_alone.params)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_continues_on_other_devices(trained_alone, tmp_path):
    """A step on two devices, one on a mesh, one on one device."""

    def stop(_):
        raise KeyboardInterrupt

    two = warmed(tmp_path, trained_alone, devices=2)
    with pytest.raises(KeyboardInterrupt):
        run(two, log=quiet, on_step=stop)
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path, "dapo", **STALE, **LAYOUTS[2]), log=quiet, on_step=stop)
    close(run(config(tmp_path, "dapo", **STALE), log=quiet), trained_alone, 1e-4)


def test_the_sampler_is_as_stale_as_configured(tmp_path):
    """Step k samples from the parameters that step k - 2 began with (of step 0, at first)."""
    settings = config(tmp_path, "grpo", staleness=2, steps=5)
    seen, used = [], []

    class Watched(Trainer):
        def rollout(self, step):
            seen.append(self.layout.fetch(self.state.params))
            used.append(self.layout.fetch(self.sampler_params(step)[0]))
            return super().rollout(step)

    original, research.loop.Trainer = research.loop.Trainer, Watched
    try:
        run(settings, log=quiet)
    finally:
        research.loop.Trainer = original
    for step, params in enumerate(used):
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(seen[max(step - 2, 0)])):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(*(jax.tree.leaves(p)[0] for p in seen[:2]))


@pytest.mark.parametrize("change", LAYOUTS)
def test_the_same_responses_on_any_devices(change, tmp_path):
    """Every response has a random key of its own; the rows are not a multiple of the shards."""

    def responses(**change):
        with opened(config(tmp_path / "none", "grpo", **change), log=quiet) as trainer:
            records, ids = PromptOrder(trainer.task, 0).next(3)
            placed = trainer.sampler_params(0)
            return trainer.respond(placed, records, ids, 0, group_size=4, seed=0)

    alone, found = responses(), responses(**change)
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    np.testing.assert_array_equal(found.mask, alone.mask)
    np.testing.assert_allclose(found.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)
    assert len(np.unique(alone.tokens, axis=0)) > 6
