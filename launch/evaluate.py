"""Evaluates a run or a model on held-out prompts of a task.

python -m launch.evaluate --from_run=RUN --workdir=RUN
python -m launch.evaluate --config.model=DIR --config.task.name=reasoning_gym
"""

import json

from absl import flags as absl_flags

from launch import flags

OUT = absl_flags.DEFINE_string("out", "", "File to write the figures to, as JSON.")


def evaluate(config):
    """Prints greedy accuracy, pass@k, majority@k, length and format rate."""
    from research.loop import opened

    with opened(config) as trainer:
        found = trainer.evaluate(trainer.step)
    for name, value in found.items():
        print(f"{name:<18}{value:.4f}")
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    flags.main(evaluate, __doc__)
