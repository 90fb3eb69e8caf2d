"""The default task and settings of each paper: those in which its mechanism shows.

Slug -> {dotted path of the config: value}. A paper that is not listed runs the default job. Off-
policy papers sample from stale parameters; papers about the mismatch of sampler and trainer
sample in bfloat16. A paper that asks for a teacher gets the same model after 400 supervised
updates, unless it names another.
"""

_STALE = {"staleness": 4}
_MISMATCH = {"staleness": 1, "sampler_dtype": "bfloat16"}

DEFAULT_TASK = {"max_operand": 50, "slips": 0.65}
"""Parameters of the embedded task: a tiny model learns to count from demonstrations of which two
thirds are off by one, and reinforcement puts that right."""

SETTINGS = {
    "cispo": _STALE,
    "decoupled-ppo": {**_STALE, **_MISMATCH, "staleness": 4},
    "dr-grpo": {},
    "dual-clip-ppo": {**_STALE, "update.minibatches": 4},
    "dynamic-sampling": {"prompts_per_step": 16},
    "grpo": {"objective.beta": 0.001, "update.minibatches": 2},
    "gspo": {"update.minibatches": 4},
    "gspo-token": {"update.minibatches": 4},
    "kpo": {**_STALE, "objective.process_noise": 0.05},
    "minpro": _STALE,
    "mis": _MISMATCH,
    "ppo": {"update.minibatches": 4},
    "soft-overlong": {"reward.soft_overlong.cache": 2},
    "tis": _MISMATCH,
}
