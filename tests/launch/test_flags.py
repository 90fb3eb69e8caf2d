"""The command line: what is built from it, and what a mistake is told."""

import json
import shutil
import sys

import numpy as np
import pytest
from absl import flags as absl_flags

from launch import flags, train
from research import reporting
from tests.launch.test_papers_train import SMALL

RUN = {**SMALL, "steps": 2, "warmup.steps": 2}


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs launch.train with arguments; returns (exit code, printed lines, error text)."""
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", "")

    def forget():
        absl_flags.FLAGS.unparse_flags()
        for name in list(absl_flags.FLAGS):
            if name.split(".")[0] in ("config", "paper", "from_run", "workdir", *flags.FLAGS):
                delattr(absl_flags.FLAGS, name)

    def call(*arguments, run=train.train, settings=None):
        given = [f"--config.{k}={v}" for k, v in (settings or {}).items()]
        monkeypatch.setattr(sys, "argv", ["train", *given, *arguments])
        with pytest.raises(SystemExit) as ended:
            flags.main(run, train.__doc__)
        forget()
        out, errors = capsys.readouterr()
        return ended.value.code, out, errors

    yield call
    forget()


@pytest.fixture
def resolved(command):
    """The config that arguments resolve to."""

    def resolve(*arguments):
        found = []
        code, _, errors = command(*arguments, run=found.append)
        assert code is None, errors
        return found[0]

    return resolve


# -- what is built ---------------------------------------------------------------------------------


def test_the_paper_brings_its_stages_and_settings(resolved):
    config = resolved("--paper=qae")
    assert config.paper == "qae"
    assert config.stages.advantage == "qae_advantage"
    assert 0 < config.advantage.quantile < 1


def test_stage_flags_replace_stages(resolved):
    config = resolved("--advantage=rloo", "--credit=tis,mis", "--regularizers", "entropy-bonus")
    assert config.stages.advantage == "rloo_advantage"
    assert config.stages.credit == "tis_credit,mis_credit"
    assert config.stages.objective == "grpo_loss"
    assert "entropy" in config.stages.regularizers
    assert set(config.credit) == {"tis_credit", "mis_credit"}


def test_overrides_reach_every_field(resolved):
    config = resolved(
        "--paper=dapo",
        "--credit=tis",
        "--workdir=elsewhere",
        "--config.objective.clip_high=0.3",
        "--config.credit.tis_credit.cap=5.0",
        "--config.optimizer.learning_rate=1e-5",
        "--config.rewards.exact=0.5",
        "--config.model_fields.num_layers=3",
        "--config.task.max_operand=5",
        "--config.steps=7",
    )
    assert config.objective.clip_high == 0.3
    assert config.credit.tis_credit.cap == 5.0
    assert config.optimizer.learning_rate == 1e-5
    assert config.rewards.exact == 0.5 and config.model_fields.num_layers == 3
    assert config.task.max_operand == 5 and config.steps == 7
    assert config.workdir == "elsewhere"


def test_any_literal_is_a_hyperparameter(resolved):
    """A bound may be None, a number or a word, whatever its default is."""
    config = resolved(
        "--config.objective.clip_high=None",
        "--config.objective.clip_low=0",
        "--config.objective.aggregation=token_mean",
    )
    assert config.objective.clip_high is None
    assert config.objective.clip_low == 0
    assert config.objective.aggregation == "token_mean"


def test_help_lists_every_field_with_its_meaning(command):
    code, out, errors = command("--paper=dapo", "--help")
    shown = out + errors
    for path, (_, meaning) in flags.FIELDS.items():
        if path in ("rewards", "model_fields"):
            continue  # open fields, empty unless given
        assert f"--config.{path} = " in shown, path
        assert " ".join(meaning.split()) in " ".join(shown.split()), path
    assert "Stages of --paper=dapo" in shown and "--config.objective.clip_high = 0.28" in shown


# -- mistakes --------------------------------------------------------------------------------------

BEFORE = 2
"""Exit code of a command line that makes no config; 1 is that of a run that cannot be made."""


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["--paper=grop"], BEFORE, ["'grop'", "grpo"]),
        (["--advantage=rlo"], BEFORE, ["'rlo'", "rloo"]),
        (["--credit=tis,miss"], BEFORE, ["'miss'", "mis"]),
        (["--config.learning_rate=1"], BEFORE, ["learning_rate", "optimizer.learning_rate"]),
        (["--config.objective.clip_hihg=0.3"], BEFORE, ["clip_hihg", "objective.clip_high"]),
        (["--config.task.name=additon"], BEFORE, ["'additon'", "addition"]),
        (["--config.task.max_operands=9"], BEFORE, ["max_operands", "task.max_operand"]),
        (["--from_run=nowhere"], BEFORE, ["No saved config at nowhere"]),
        (["steps=3"], BEFORE, ["unexpected argument 'steps=3'", "--NAME=VALUE"]),
        (["--papr=grpo"], 1, ["papr", "paper"]),
        (["--config.steps=many"], 1, ["steps", "many"]),
        (["--config.rewards.exat=1.0"], 1, ["'exat'", "exact"]),
        (["--config.model=nanno"], 1, ["'nanno'", "nano"]),
        (["--config.optimizer.name=adamv"], 1, ["'adamv'", "adamw"]),
        (["--config.mesh=data:2,tensr:2"], 1, ["tensr:2", "AXIS:SIZE"]),
        (["--config.devices=99"], 1, ["devices=99", "has 8"]),
        (["--config.sampling.max_prompt_tokens=2"], 1, ["A prompt of 4 tokens", "=2"]),
        (["--config.sampling.max_new_tokens=300"], 1, ["304", "context of 256 tokens"]),
        (["--config.update.minibatches=3"], 1, ["minibatches=3", "prompts_per_step=4"]),
        (["--config.teacher=sft:few", "--paper=opd"], 1, ["'sft:few'", "sft:STEPS"]),
    ],
)
def test_a_mistake_is_told_in_one_paragraph(arguments, code, words, command, tmp_path):
    settings = {**RUN, "workdir": tmp_path / "run"}
    found, _, errors = command(*arguments, settings=settings)
    assert found == code, errors
    message = errors.strip()
    for word in words:
        assert word in message, message
    if code == BEFORE or message.startswith("error:"):
        assert message.startswith("error: ") and "\n" not in message, message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "line, words",
    [
        ("{not json}", "line 2: not JSON"),
        ('{"text": "1+1="}', "line 2: no prompt among the fields ['text']"),
    ],
)
def test_a_line_of_a_prompt_file_that_is_wrong_is_named(line, words, command, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    settings = {k: v for k, v in RUN.items() if not k.startswith("task.")}
    settings |= {"task.name": "jsonl", "task.path": file, "workdir": tmp_path / "run"}
    code, _, errors = command(settings=settings)
    assert code == 1
    assert f"{file}, {words}" in errors and "\n" not in errors.strip()


# -- a run from the command line -------------------------------------------------------------------


@pytest.fixture
def trained(command, tmp_path):
    settings = {**RUN, "workdir": tmp_path / "first", "objective.clip_high": None}
    code, out, errors = command("--paper=dapo", "--advantage=rloo", settings=settings)
    assert code is None, errors
    return tmp_path / "first", out


def test_a_run_prints_and_saves_its_config(trained):
    workdir, out = trained
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["paper"] == "dapo" and saved["stages"]["advantage"] == "rloo_advantage"
    assert saved["objective"]["clip_high"] is None
    assert saved["steps"] == 2 and saved["optimizer"]["b2"] == 0.99
    for line in ("paper: dapo", "advantage: rloo_advantage", "clip_high: null", "step 2/2"):
        assert line in out, line


def test_from_run_repeats_a_run(trained, command, tmp_path):
    workdir, _ = trained
    code, _, errors = command(f"--from_run={workdir}", f"--workdir={tmp_path / 'second'}")
    assert code is None, errors
    first, second = (json.loads((d / "config.json").read_text())
                     for d in (workdir, tmp_path / "second"))  # fmt: skip
    assert first | {"workdir": second["workdir"]} == second
    for a, b in zip(*(reporting.read_metrics(d) for d in (workdir, tmp_path / "second"))):
        for name in a.keys() - {"seconds", "tokens_per_second"}:
            np.testing.assert_equal(a[name], b[name], name)


def test_from_run_takes_overrides_and_refuses_another_runs_directory(trained, command, tmp_path):
    workdir, _ = trained
    changed = f"--from_run={workdir}", "--config.group_size=2"
    code, _, errors = command(*changed)
    assert code == 1 and "group_size: 4 -> 2" in errors
    shutil.copytree(workdir / "initial", tmp_path / "other" / "initial")
    code, out, errors = command(*changed, f"--workdir={tmp_path / 'other'}")
    assert code is None, errors
    assert "group_size: 2" in out and "step 2/2" in out
