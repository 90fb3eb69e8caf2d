"""The papers whose expensive tests belong to the default run; the others' carry the mark `slow`."""

from collections.abc import Iterable

import pytest

CORE = (
    "reinforce", "ppo", "gae", "grpo", "grpo-advantage", "dapo", "dr-grpo", "gspo", "gspo-token",
    "cispo", "rloo", "remax", "reinforce-pp", "sft", "kl-estimators", "entropy-bonus",
    "dual-clip-ppo", "decoupled-ppo", "tis", "mis", "soft-overlong", "dynamic-sampling", "minpro",
    "kpo", "opd", "opd-full",
)  # fmt: skip


def core_first(slugs: Iterable[str]) -> list:
    """Returns the slugs as test parameters, those outside `CORE` marked `slow`."""
    marked = [(s, () if s in CORE else (pytest.mark.slow,)) for s in slugs]
    return [
        pytest.param(slug, marks=marks) for slug, marks in sorted(marked, key=lambda m: bool(m[1]))
    ]
