"""The default task and settings of each paper: those in which its mechanism shows.

Slug -> {dotted path of the config: value}. A paper that is not listed runs the default job. Off-
policy papers sample from stale parameters; papers about the mismatch of sampler and trainer
sample in bfloat16. A paper that asks for a teacher gets the same model after 400 supervised
updates, unless it names another.
"""

_STALE = {"staleness": 4}
_MISMATCH = {"staleness": 1, "sampler_dtype": "bfloat16"}
_TURNS = {
    "task.name": "two_attempts",
    "task.max_operand": 20,
    "sampling.max_prompt_tokens": 6,
    "sampling.max_new_tokens": 4,
    "sampling.max_reply_tokens": 1,
}
_STEPS = {
    "task.name": "chain",
    "sampling.max_prompt_tokens": 6,
    "sampling.max_new_tokens": 10,
    "sampling.max_reply_tokens": 1,
}
_LOOKUP = {
    "task.name": "lookup",
    "sampling.max_prompt_tokens": 14,
    "sampling.max_new_tokens": 4,
}
_RUBRIC = {
    "task.name": "rubric",
    "task.max_operand": 20,
    "sampling.max_prompt_tokens": 7,
    "sampling.max_new_tokens": 4,
}

DEFAULT_TASK = {"max_operand": 40, "stray": 0.65}
"""Parameters of the embedded task: of the demonstrations that teach a tiny model to add, two thirds
end in a stray sign; reinforcement breaks the habit and goes on to improve the sums."""

SETTINGS = {
    "a-lol": {"update.epochs": 2},
    "a3po": {"credit.a3po_credit.step": "run.step"},
    "adrs": {**_TURNS, "advantage.eta": "run.window", "teacher": "self:example"},
    "aem": _TURNS,
    "agentopsd": {**_TURNS, "teacher": "self:example"},
    "aligndistil": {"teacher": "dpo:100"},
    "attention-entropy-anchors": {"credit.attention_entropy_advantage.progress": "run.progress"},
    "bcpg-nsa": {**_STEPS, "update.epochs": 2},
    "capo-curriculum": {
        "credit.capo_credit.step": "run.step",
        "credit.capo_credit.total_steps": "run.steps",
    },
    "cispo": _STALE,
    "clip-cov": {"objective.ratio_cov": 0.01, "objective.cov_low": 0.1},
    "copsd": {**_RUBRIC, "teacher": "start:translation", "warmup.hinted": 0.5},
    "cort-rubric": _RUBRIC,
    "decoupled-ppo": {**_STALE, **_MISMATCH, "staleness": 4},
    "dense-irl": {"demonstrations": 1},
    "divergence-weighted": {"update.minibatches": 4},
    "dr-grpo": {},
    "drift": {"task.size": 256, "teacher": "self:success", "warmup.hinted": 0.5},
    "dual-clip-ppo": {**_STALE, "update.minibatches": 4},
    "dynamic-sampling": {"prompts_per_step": 16},
    "epo": {
        **_TURNS,
        "update.minibatches": 2,
        "regularizers.epo_regularizer.weight": "run.smoothing_weight",
    },
    "esr": {"objective.prefix": 2},
    "flowtracer": _STEPS,
    "fspo-factuality": _STEPS,
    "gdro": {"task.size": 256},
    "gem-rebn": {**_TURNS, "advantage.gamma": 0.9},
    "gkd": {"demonstrations": 4},
    "grpo": {"objective.beta": 0.001, "update.minibatches": 2},
    "gspo": {"update.minibatches": 4},
    "gspo-token": {"update.minibatches": 4},
    "gtr-turbo": {**_STEPS, "task.turns": 2, "teacher": "merge"},
    "hicra": _STEPS,
    "hint-sd": {**_TURNS, "teacher": "ema:hindsight", "ema": 0.95},
    "invalid-action-masking": {"sampling.allowed": "0123456789"},
    "kpo": {**_STALE, "objective.process_noise": 0.05},
    "minpro": _STALE,
    "mis": _MISMATCH,
    "mopd": {**_RUBRIC, **_MISMATCH, "teacher": "domains:400"},
    "mssr": {"task.size": 1024, "prompts_per_step": 256, "group_size": 1},
    "mtp-occ": {"objective.prev_coef": "last.coef"},
    "omniopd": {**_STEPS, "teacher": "sft:400"},
    "opd2": {"teacher": "sft:400"},
    "opid": _TURNS,
    # Sums partly learned: prompts of low and of high success come in one batch.
    "pair-wgrpo": {
        "task.name": "addition",
        "task.max_operand": 4,
        "task.stray": 0.0,
        "sampling.max_prompt_tokens": 4,
        "sampling.max_new_tokens": 3,
        "warmup.steps": 40,
        "prompts_per_step": 32,
    },
    "pcsd": {**_TURNS, "teacher": "self:example"},
    "pepo": {**_LOOKUP, "credit.pepo_advantage.progress": "run.progress"},
    "perceval": _STEPS,
    "pgpo": _LOOKUP,
    "ppo": {"update.minibatches": 4},
    "rlcsd": {"teacher": "self:sibling", "warmup.hinted": 0.5},
    "rlfr": _STEPS,
    "rlmec": {**_STEPS, "teacher": "sft:400:solution"},
    "rltf": _TURNS,
    "sdar": {"teacher": "self:example", "warmup.hinted": 0.5},
    "seed-opd": {**_TURNS, "teacher": "self:hindsight"},
    "soft-overlong": {"reward.soft_overlong.cache": 2},
    "spae": {**_STEPS, "sampling.max_prompt_tokens": 18},
    "st-ppo": {**_TURNS, **_STALE, "update.minibatches": 4},
    "stepopsd": {**_TURNS, "teacher": "self:hindsight"},
    "swe-dapo": {**_TURNS, "objective.turn_threshold": 1, "objective.max_turns": 3},
    "tcod": {**_TURNS, "advantage.step": "run.step", "advantage.max_turns": 2},
    "tgdpo": {"teacher": "dpo:50"},
    "tis": _MISMATCH,
    "trloo": _TURNS,
    "trust-sql": _STEPS,
    "ts-grpo": _STEPS,
    "tt-opd": {
        **_TURNS,
        "teacher": "ema:hindsight",
        "ema": 0.95,
        "regularizers.tt_opd_regularizer.kl_coef": "run.phased_out",
    },
    "turnopd": {**_TURNS, "credit.turnopd_weights.alpha": "run.ramp"},
    "verl-rank": _STEPS,
    "video-ktr": _LOOKUP,
    "vppo": _LOOKUP,
}
