"""The configuration of a run: one table of fields, a paper's settings on top, then overrides.

A config is data (ml_collections). `build` makes it from the name of a paper and replacements of
its stages; the result, printed and saved by the launcher, is enough to repeat the run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference

import losses
from losses.catalogue import nearest
from research.schedules import bound_names
from research.settings import DEFAULT_TASK, SETTINGS

FIELDS = {
    "paper": ("grpo", "Slug of the paper whose stages and settings the run starts from."),
    "seed": (0, "Seed of everything random: initialisation, prompts, sampling, order."),
    "steps": (80, "Rollout-and-update steps."),
    "workdir": ("", "Where metrics, checkpoints, config and report go; runs/PAPER if empty."),
    "model": ("tiny", "A preset of models.config, or a local Hugging Face directory."),
    "model_fields": (ConfigDict(), "Fields of the model's config to replace, e.g. num_layers."),
    "param_dtype": ("float32", "Type of the parameters: float32, bfloat16 or float16."),
    "compute_dtype": ("float32", "Type the network computes in; losses stay float32."),
    "tokenizer": (
        "",
        "Characters (empty, for presets) or a .model file; a HF directory has its own.",
    ),
    "lora.rank": (0, "Rank of low-rank adapters; 0 trains all parameters."),
    "lora.alpha": (16.0, "Scale of the adapters: alpha / rank."),
    "lora.targets": ("q,k,v,o", "Comma-separated kernels that get adapters."),
    "task.name": ("addition", "Name of the task (research.tasks)."),
    "prompts_per_step": (64, "Prompts sampled each step."),
    "group_size": (8, "Responses to each prompt."),
    "demonstrations": (0, "Of these, demonstrations of the task instead of samples."),
    "sampling.max_prompt_tokens": (6, "Width of the prompt; a longer prompt is an error."),
    "sampling.max_context_tokens": (
        0,
        "Width of other prompts that responses are scored under; 0: twice the prompt's plus "
        "max_new_tokens.",
    ),
    "sampling.max_new_tokens": (5, "Generation limit of a response, in tokens."),
    "sampling.max_reply_tokens": (4, "Width of an environment's reply between two turns."),
    "sampling.allowed": ("", "Characters that responses are restricted to; empty: no restriction."),
    "sampling.temperature": (1.0, "Temperature of the policy, for sampler and trainer alike."),
    "sampling.top_k": (0, "Sample among the k likeliest tokens; 0 is off."),
    "sampling.top_p": (1.0, "Nucleus probability; 1 is off."),
    "sampling.min_p": (0.0, "Drop tokens below min_p times the likeliest; 0 is off."),
    "staleness": (0, "Sample from the parameters of this many updates ago."),
    "sampler_dtype": ("", "Compute and parameter type of the sampler; empty: the trainer's."),
    "sampler_noise": (0.0, "Relative Gaussian noise on the sampler's parameters."),
    "rewards": (ConfigDict(), "Reward name -> weight; empty: the task's own."),
    "on_reward_error": ("stop", "stop (checkpoint saved) or zero (counted) when a reward fails."),
    "reward_processes": (0, "Worker processes that grade responses; 0 grades in place."),
    "update.epochs": (1, "Passes over each rollout."),
    "update.minibatches": (1, "Optimiser steps per pass; whole groups stay together."),
    "update.microbatches": (1, "Slices of a minibatch that go through the model at a time."),
    "update.head_chunk": (1024, "Tokens per slice of the vocabulary head."),
    "optimizer.name": ("adamw", "adamw, adam, sgd or lion."),
    "optimizer.learning_rate": (2e-4, "Peak learning rate."),
    "optimizer.schedule": ("linear", "constant, linear or cosine decay after the warm-up."),
    "optimizer.warmup_steps": (5, "Updates of linear warm-up."),
    "optimizer.weight_decay": (0.0, "Decoupled weight decay."),
    "optimizer.b1": (0.9, "First-moment decay."),
    "optimizer.b2": (0.99, "Second-moment decay."),
    "optimizer.clip_norm": (1.0, "Bound on the global gradient norm; 0 is none."),
    "ema": (0.0, "Decay of an average of the parameters; evaluation then uses it. 0 is none."),
    "teacher": (
        "",
        "Teacher: a model directory, sft:STEPS, domains:STEPS, dpo:STEPS, ema, self or start, and "
        "behind a colon the prompt it reads, e.g. self:solution (research.teachers).",
    ),
    "warmup.steps": (800, "Supervised updates on the task's demonstrations before the first step."),
    "warmup.batch_size": (96, "Demonstrations per supervised update."),
    "warmup.learning_rate": (3e-3, "Learning rate of the supervised updates."),
    "warmup.hinted": (
        0.0,
        "Share of the warm-up's demonstrations that stand behind the hint of the teacher's prompt.",
    ),
    "selection.max_rounds": (10, "Rounds of sampling in search of prompts a selection keeps."),
    "evaluation.every": (40, "Steps between evaluations; 0: only before and after."),
    "evaluation.prompts": (128, "Held-out prompts; 0 skips every evaluation."),
    "evaluation.samples": (8, "Samples per held-out prompt for pass@k and majority@k."),
    "checkpoint.every": (20, "Steps between checkpoints; 0: only at the end."),
    "checkpoint.keep": (2, "Checkpoints kept."),
    "devices": (0, "Local devices to use under pmap; 0: all."),
    "distributed.auto": (False, "Join the processes that SLURM, Open MPI or a TPU pod started."),
    "distributed.coordinator": ("", "HOST:PORT of the first process, where they meet."),
    "distributed.processes": (1, "Processes of the run, one a host; the same on all."),
    "distributed.process": (0, "Number of this process, from 0; process 0 writes."),
    "mesh": ("", "Mesh axes for models that outgrow a device, e.g. data:2,fsdp:2,tensor:2."),
    "max_skipped": (10, "Stop after this many consecutive updates with a non-finite gradient."),
}
"""Dotted path -> (default, meaning)."""

SLOTS = ("selection", "reward", "advantage", "credit", "objective", "regularizers")
_LISTS = ("selection", "reward", "credit", "regularizers")
FLAGS = ("advantage", "credit", "objective", "regularizers")
"""The stages that flags of their own replace."""


class Config(ConfigDict):
    """A ConfigDict whose field `update` is read by its name, like every other field."""

    @property
    def update(self):
        return self["update"]


class ConfigError(ValueError):
    """A config that cannot be run, and what to write instead."""


def build(
    paper: str = "grpo",
    *,
    overrides: Mapping[str, Any] | None = None,
    **stages: Any,
) -> Config:
    """Returns the resolved config of a paper.

    Args:
      paper: slug; its stages, their defaults and its settings (research.settings) fill the config.
      overrides: dotted path -> value, applied last.
      **stages: advantage, objective (a name or function), credit, regularizers (names, a sequence
        or a comma-separated string): stages to use instead of the paper's.

    Returns:
      A Config with the fields of `FIELDS` and, under the name of each stage's slot, its
      hyperparameters: `config.objective.clip_high`, `config.credit.tis_credit.cap`. A stage's
      `max_length` is "run" unless set: the run's generation limit.

    Raises:
      ConfigError: an unknown field, with the nearest one.
      losses.CatalogueError: an unknown paper or stage.
    """
    entry = losses.entry(paper)
    changes = {slot: _split(spec) for slot, spec in stages.items() if spec not in (None, "", ())}
    composed = losses.paper(entry.slug, **changes)
    config = Config()
    for path, (default, _) in FIELDS.items():
        _put(config, path, default.copy_and_resolve_references()
             if isinstance(default, ConfigDict) else default)  # fmt: skip
    config.paper = entry.slug
    config.stages = ConfigDict({slot: _names(getattr(composed, slot)) for slot in SLOTS})
    for slot in SLOTS:
        _add_hyper(config, slot, getattr(composed, slot))
    settings = {**_teacher_default(composed), **SETTINGS.get(entry.slug, {})}
    task = dict(overrides or {}).get("task.name", settings.get("task.name", config.task.name))
    config.task.update(_task_parameters(task))
    for path, value in {**settings, **(overrides or {})}.items():
        if path in settings and path not in (overrides or {}) and not _exists(config, path):
            continue  # a setting of the paper's own stage, which a flag has replaced
        set_field(config, path, value)
    return config


def _teacher_default(composed):
    """A teacher for the papers that need one: the same model, trained longer on the task."""
    wanted = any(name.startswith("teacher_") for name in composed.needs)
    return {"teacher": "sft:400"} if wanted else {}


def _task_parameters(name: str) -> dict[str, Any]:
    """The parameters of a task with their defaults, as fields of `config.task`."""
    from research.tasks import task_parameters

    embedded = DEFAULT_TASK if name == "addition" else {}
    return {"name": name, **task_parameters(name), **embedded}


def _split(spec):
    return tuple(s for s in spec.split(",") if s) if isinstance(spec, str) and "," in spec else spec


def _names(stage):
    if stage is None:
        return ""
    if isinstance(stage, losses.Stage):
        return stage.paper.name
    return ",".join(s.paper.name for s in stage)


def _add_hyper(config, slot, stages):
    if stages is None or stages == ():
        if slot not in config:
            config[slot] = ConfigDict()
        return
    listed = slot in _LISTS
    for stage in stages if listed else (stages,):
        path = f"{slot}.{stage.paper.name}" if listed else slot
        if path not in config:
            _put(config, path, ConfigDict())
        for name, value in stage.settings.items():
            if name == "max_length" and name not in stage.hyper:
                value = "run"
            # Any literal may stand here: None for a bound, a word for a mode.
            _put(config, f"{path}.{name}", FieldReference(value, field_type=object))


def _put(config, path, value):
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in config:
            config[name] = ConfigDict()
        config = config[name]
    config[leaf] = value


def _exists(config, path):
    for name in path.split("."):
        if not isinstance(config, ConfigDict) or name not in config:
            return False
        config = config[name]
    return True


OPEN = ("task", "rewards", "model_fields")
"""Fields whose entries are named by what they configure, and checked there."""


def set_field(config: ConfigDict, path: str, value: Any) -> None:
    """Sets `config.PATH = value`.

    Raises:
      ConfigError: there is no such field (with the nearest ones), or the type does not fit.
    """
    if path.split(".")[0] in OPEN and "." in path and not path.startswith("task.name"):
        _put(config, path, value)
        return
    if not _exists(config, path):
        raise ConfigError(
            f"Unknown field config.{path}.{nearest(path, field_paths(config))} "
            "`python -m launch.train --help` lists every field."
        )
    *parents, leaf = path.split(".")
    where = config
    for name in parents:
        where = where[name]
    try:
        where[leaf] = value
    except TypeError as error:
        raise ConfigError(f"config.{path} = {value!r}: {error}") from None


def field_paths(config: ConfigDict, prefix: str = "") -> list[str]:
    """Returns the dotted path of every field."""
    paths = []
    for name in config:
        value = config[name]
        path = f"{prefix}{name}"
        paths += field_paths(value, f"{path}.") if isinstance(value, ConfigDict) else [path]
    return paths


def saved(run: str | Path) -> Config:
    """Returns the config that a run saved: enough to repeat or resume it.

    Args:
      run: a work directory, or the config.json in one.

    Raises:
      ConfigError: there is none, or it is not a config.
    """
    path = Path(run)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"No saved config at {path}: expected the work directory of a run.")
    try:
        return Config(json.loads(path.read_text()))
    except ValueError as error:
        raise ConfigError(f"{path} is not a config: {error}") from None


def composition(config: ConfigDict, objective=None) -> losses.Composed:
    """Returns the composed objective of a config, with all its hyperparameters.

    Args:
      config: from `build`.
      objective: a function of the user's own in place of the config's objective.
    """
    limit = config.sampling.max_new_tokens

    def stage(name, hyper):
        values = {k: v for k, v in hyper.items()}
        if values.get("max_length") == "run":
            values["max_length"] = limit
        return (name, {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def one(slot):
        name = config.stages[slot]
        return stage(name, config[slot]) if name else None

    def several(slot):
        names = [n for n in config.stages[slot].split(",") if n]
        return tuple(stage(n, config[slot][n] if n in config[slot] else {}) for n in names)

    composed = losses.compose(
        selection=several("selection"),
        reward=several("reward"),
        advantage=one("advantage"),
        credit=several("credit"),
        objective=objective if objective is not None else one("objective"),
        regularizers=several("regularizers"),
    )
    bound_names(composed.stages)  # a misspelt schedule ends here
    return composed
