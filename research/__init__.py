"""Experiments: tasks, rewards, rollouts, signals, the exact update, the loop.

config = research.build("minpro", overrides={"staleness": 8})
result = research.run(config)
"""

from research.config import ConfigError, build, composition

__all__ = ["ConfigError", "build", "composition", "run"]


def run(config, **kwargs):
    """Trains as a config says; see `research.loop.run`."""
    from research.loop import run as run_loop  # models and optimisers load on use

    return run_loop(config, **kwargs)
