"""Every paper of the catalogue trains from its one flag, on the smallest model."""

import numpy as np
import pytest

import losses
import research
from research.loop import run
from research.settings import SETTINGS
from tests.core import core_first

SMALL = {
    "model": "nano",
    "steps": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "task.max_operand": 9,
    "task.stray": 0.0,
    "warmup.steps": 60,
    "warmup.batch_size": 32,
    "warmup.learning_rate": 1e-2,
    "sampling.max_prompt_tokens": 4,
    "sampling.max_new_tokens": 3,
    "evaluation.prompts": 0,
    "checkpoint.every": 0,
    "devices": 1,
}


def small(slug):
    """The paper's own config, cut down in everything but its mechanism."""
    config, own = research.build(slug), SETTINGS.get(slug, {})
    own_task = "task.name" in own
    overrides = {
        k: v for k, v in SMALL.items() if not (own_task and k.startswith(("task.", "sampling.")))
    }
    if config.teacher.startswith("sft:"):
        overrides["teacher"] = "sft:4"
    if config.update.minibatches > 1:
        overrides["update.minibatches"] = 2
    overrides["staleness"] = min(config.staleness, 2)
    for path in ("prompts_per_step", "group_size"):
        most = 32 if path in own else SMALL[path]
        overrides[path] = min(max(config[path], 2), most) if config[path] > 1 else 1
    return research.build(slug, overrides=overrides)


@pytest.mark.parametrize("slug", core_first(p.slug for p in losses.papers()))
def test_paper_trains_from_its_flag(slug, tmp_path):
    config = small(slug)
    config.workdir = str(tmp_path / "run")
    logs = []
    result = run(config, log=logs.append)
    assert len(result.history) == 3
    for logged in result.history:
        assert np.isfinite(logged["loss"]) and np.isfinite(logged["grad_norm"])
        assert logged["skipped"] == 0
    metric = losses.entry(slug).metric
    if metric is not None:
        assert metric in result.history[-1], sorted(result.history[-1])
    moved = any(logged["grad_norm"] > 0 for logged in result.history)
    assert moved, "no step had a gradient"
