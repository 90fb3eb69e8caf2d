"""The training loop: one run, read from top to bottom.

selection picks prompts -> rollouts sample and grade responses -> signals fill the arrays that the
paper asks for -> the update runs the composed objective -> evaluation now and then.
"""

import collections
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import losses
from losses.catalogue import needs_of
from losses.distillation.mopd import teacher_of
from models import ModelConfig, lora, override, sampling, scoring
from models.load import count, load, load_tokenizer
from research import (
    checkpoints,
    devices,
    evaluation,
    reporting,
    rewards,
    schedules,
    signals,
    teachers,
    update,
)
from research import rollouts as ro
from research.config import Config, ConfigError, composition
from research.selection import PromptOrder
from research.signals.contexts import CONTEXTS, warmup_hint
from research.signals.contexts import hinted as hinted_prompt
from research.statistics import LOGITS_OF, STATISTICS, statistics, streamed
from research.tasks import Record, damaged, get_task

MOVING = {"logprobs", "entropy"}
"""Arrays that a credit stage reads of the policy as it is in each update."""


@dataclasses.dataclass
class Result:
    """What a run leaves behind.

    Attributes:
      workdir: metrics, checkpoints, config and report.
      before, after: evaluation after the warm-up and at the end.
      history: one dict of logged scalars per step.
      params: the final parameters, on the host.
      model: their ModelConfig.
    """

    workdir: Path
    before: dict[str, float]
    after: dict[str, float]
    history: list[dict[str, float]]
    params: Any
    model: ModelConfig


def run(
    config: ConfigDict,
    *,
    objective: Callable | None = None,
    log: Callable[[str], None] = print,
    on_step: Callable[[dict], None] | None = None,
) -> Result:
    """Trains as the config says, resuming from the work directory's last checkpoint.

    Args:
      config: from `research.config.build`.
      objective: a function with the catalogue's argument names, instead of the config's objective.
      log: receives the progress lines.
      on_step: receives each step's logged scalars.

    Returns:
      A Result.

    Raises:
      ConfigError: the config cannot be run, or the work directory holds another one.
      rewards.RewardError: a reward failed and `on_reward_error` is "stop"; a checkpoint is saved.
      RuntimeError: too many consecutive updates had a non-finite gradient; a checkpoint is saved.
    """
    if jax.process_index():  # of several, the first speaks and writes
        log = _silent
    trainer = Trainer(config, objective, log)
    with checkpoints.Store(trainer.workdir, config, log) as store:
        store.save_config()
        try:
            trainer.start(store)
            for step in range(trainer.step, config.steps):
                logged = trainer.train_step(step)
                if on_step:
                    on_step(logged)
                every = config.checkpoint.every
                if every and (step + 1) % every == 0 and step + 1 < config.steps:
                    store.save(step + 1, trainer.snapshot())
            return trainer.finish(store)
        except (rewards.RewardError, RuntimeError, KeyboardInterrupt):
            if trainer.whole:
                store.save(trainer.step, trainer.snapshot())
            raise
        finally:
            trainer.close()


@contextlib.contextmanager
def opened(config: ConfigDict, log: Callable[[str], None] = print):
    """The trainer of a run as it stands, for evaluation and sampling.

    With a `workdir` that holds a run, its last checkpoint; else the config's model as it is,
    without a warm-up, in a temporary directory.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if not (config.workdir and (Path(config.workdir) / "config.json").exists()):
            config = Config(config.to_dict())
            config.workdir, config.warmup.steps, config.evaluation.every = scratch, 0, 0
        trainer = Trainer(config, None, log)
        with checkpoints.Store(trainer.workdir, config, log) as store:
            trainer.start(store, training=False)
            yield trainer
            trainer.close()


class Trainer:
    """The state of a run and its steps. `run` is the way in."""

    def __init__(self, config, objective, log):
        self.config, self.log = config, log
        self.composed = composition(config, objective)
        self.workdir = Path(config.workdir or f"runs/{config.paper}")
        self.late = self._late_credit()
        before = [s for s in self.composed.stages if s not in self._update_stages()]
        self.shaping = [s for s in before if s.paper.kind in ("selection", "reward")]
        self.crediting = [s for s in before if s not in self.shaping]
        self.needs = self._constants()
        self.bound = schedules.bound_names(self.composed.stages)
        self.asked = {*self.needs, *(s.paper.name for s in self.composed.stages)}
        others = [n for n in self.gradients if n not in STATISTICS]
        signals.check((*self.needs, *others), self.asked)
        self.task = get_task(seed=config.seed, **_plain(config.task))
        self.reward_weights = dict(config.rewards) or dict(self.task.rewards)
        self.teacher = teachers.parse(config.teacher)
        rewards.grade([], [], self.reward_weights)  # a misspelt reward ends here
        self.verifier = next(iter(self.task.rewards))
        workers = config.reward_processes
        self.pool = rewards.worker_pool(workers) if workers else None
        self.tokenizer = load_tokenizer(config.model, config.tokenizer, self.task.alphabet)
        self.layout = devices.layout(config.devices, config.mesh)
        self.model, params = self._policy()
        self.trainable, frozen = lora.partition(params)
        self.frozen = self.layout.place(frozen)
        self.order = PromptOrder(self.task, config.seed)
        self.step = 0
        self.carried: dict[str, np.ndarray] = {}
        self.consecutive_skips = 0
        self.metrics = None
        self.whole = False  # whether everything stands where `step` says: it can be checkpointed
        self.history: list[dict] = []
        self._compiled: dict = {}
        self._merge = None

    def close(self):
        """Ends the processes that grade and the writing of metrics."""
        if self.pool is not None:
            self.pool.shutdown()
        if self.metrics is not None:
            self.metrics.close()

    # -- models ----------------------------------------------------------------------------------

    def _loss_stages(self):
        return (self.composed.objective, *self.composed.regularizers)

    def _late_credit(self):
        """Credit by the policy as it moves: it is assigned anew in every update."""
        credit = self.composed.credit
        first = next((i for i, s in enumerate(credit) if MOVING & set(s.needs)), len(credit))
        return credit[first:]

    def _update_stages(self):
        return (*self.late, *self._loss_stages())

    def _constants(self):
        """Arrays to be made from each rollout; gradient arrays of the loss come with the update."""
        before = [s for s in self.composed.stages if s not in self._update_stages()]
        made = {name for s in before for name in s.paper.outputs}
        # An array that a loss may do without is given to it where a stage makes it.
        taken = [n for s in self._update_stages() for n in s.paper.arrays if n in made]
        loss_needs = tuple(dict.fromkeys([*needs_of(self._update_stages()), *taken]))
        moving = MOVING & set(needs_of(self.late))
        self.gradients = tuple(
            n
            for n in loss_needs
            if n in moving or any(n in s.paper.gradients for s in self._loss_stages())
        )
        token, self.streams, _ = streamed(self.composed)
        split = {"logits", *LOGITS_OF} if token else set()
        self.loss_needs = [n for n in loss_needs if n not in self.gradients and n not in split]
        if token:
            self.gradients = tuple(n for n in self.gradients if n != "logits")
        rest = [n for n in self.loss_needs if n not in made]
        return tuple(dict.fromkeys([*needs_of(before), *rest, "mask"]))

    def _policy(self):
        config = self.config
        wanted = {*self.needs, *self.gradients}
        fields = _plain(config.model_fields) | {
            "dtype": config.compute_dtype,
            "param_dtype": config.param_dtype,
            "value_head": bool(wanted & {"values", "old_values"}),
        }
        if wanted & {"mtp_logprobs", "old_mtp_logprobs"}:
            fields["mtp_heads"] = 1
        if config.lora.rank:
            fields |= {
                "lora_rank": config.lora.rank,
                "lora_alpha": config.lora.alpha,
                "lora_targets": tuple(config.lora.targets.split(",")),
            }
        model, params = load(
            config.model, self.tokenizer, seed=config.seed, mesh=self.layout.mesh, **fields
        )
        longest = config.sampling.max_prompt_tokens + self.response_width
        if longest > model.max_length:
            raise ConfigError(
                f"max_prompt_tokens and the responses' {self.response_width} tokens make {longest},"
                f" which exceeds the model's context of {model.max_length} tokens."
            )
        return model, params

    @property
    def turns(self) -> int:
        """The most turns that an episode of the task can have."""
        return getattr(self.task, "turns", 1)

    @property
    def response_width(self) -> int:
        """Tokens of a row behind its prompt: all turns, and the replies between them."""
        s = self.config.sampling
        return self.turns * s.max_new_tokens + (self.turns - 1) * s.max_reply_tokens

    @property
    def context_width(self) -> int:
        """Tokens of the prompts that responses are scored under beside their own."""
        s = self.config.sampling
        return s.max_context_tokens or 2 * s.max_prompt_tokens + s.max_new_tokens

    @property
    def served(self):
        """Parameters to evaluate, sample from and export: averaged where the run averages."""
        return (self.state.params if self.state.ema is None else self.state.ema, self.frozen)

    def start(self, store, training=True):
        """Warm-up, or the last checkpoint; to train, the evaluation before the first step too."""
        config = self.config
        updates = config.steps * config.update.epochs * config.update.minibatches
        self.optimizer = update.make_optimizer(config.optimizer, updates)
        self.log(
            f"{config.paper}: {count(self.trainable):,} trainable of "
            f"{count(self.trainable) + count(self.layout.fetch(self.frozen)):,} "
            f"parameters, task {self.task.name}, {self.layout.kind} over "
            f"{self.layout.count} device(s), work directory {self.workdir}"
        )
        initial = store.initial()
        if initial is None:
            hinted = config.warmup.hinted if self.teacher.prompt else 0.0
            warmed = self._supervised(config.warmup.steps, config.seed, "warm-up", hinted=hinted)
            initial = {"params": warmed, **self._other_models(warmed)}
            store.save_initial(initial)
        self.initial = initial
        self.sources = {}
        for name in sorted(self._asked_sources()):
            self.sources[name] = self._teacher() if name == "teacher" else self._trained(name)
        if "teacher" in self.sources and self.teacher.weights == "domains":
            for domain in self.task.domains:
                self.sources[f"teacher/{domain}"] = self._trained("domains", domain)
        self.state = self._fresh_state(initial["params"])
        self.past = collections.deque(maxlen=max(self._kept_policies(), 1))
        self.metrics = reporting.MetricsWriter(self.workdir) if not jax.process_index() else None
        resumed = store.latest(self._template())
        if resumed is not None:
            self._restore(resumed)
            if training:
                self._continue_metrics()
        elif training:
            self.before = self.evaluate(0)
            self._record(0, {f"eval/{k}": v for k, v in self.before.items()})
            self._report_evaluation(0, self.before)
        self.whole = True

    def _kept_policies(self):
        """How many of the policies of earlier steps the next steps need."""
        merged = len(teachers.MERGED) - 1 if self.teacher.weights == "merge" else 0
        return max(self.config.staleness, merged)

    def _fresh_state(self, params):
        return self._initial_state(params, self.optimizer, self.config.ema > 0)

    def _initial_state(self, params, optimizer, ema):
        return self.layout.initialise(
            lambda placed: update.initial_state(placed, optimizer, ema), self.layout.place(params)
        )

    def _asked_sources(self):
        """The models that the composition asks for beside the policy."""
        return (signals.sources(self.needs, self.asked) | set(self.streams)) - {"policy"}

    def _other_models(self, warmed):
        """Parameters of the models that are trained beside the policy, on the host."""
        asked, teacher, seed = self._asked_sources(), self.teacher, self.config.seed
        found = {}
        if "teacher" not in asked and "reverse" not in asked:
            return found
        if teacher.weights == "dpo":
            found["teacher"] = self._preferred(warmed, teacher.steps)
            if "reverse" in asked:
                found["reverse"] = self._preferred(warmed, teacher.steps, reverse=True)
        elif teacher.weights == "domains":
            if self.streams or not hasattr(self.task, "domains"):
                raise ConfigError(
                    f"teacher={self.config.teacher!r} scores sampled tokens, on a task whose "
                    "records have domains: use task.name=rubric, and a paper that reads "
                    "teacher_logprobs."
                )
            found["domains"] = {
                domain: self._supervised(
                    teacher.steps,
                    seed + 1,
                    f"teacher of {domain}",
                    accept=lambda record, domain=domain: record.info["domain"] == domain,
                )
                for domain in self.task.domains
            }
        elif teacher.weights == "sft":
            if "teacher_base" in asked:
                found["teacher_base"] = self._supervised(
                    self.config.warmup.steps, seed + 2, "teacher's base"
                )
            found["teacher"] = self._supervised(
                teacher.steps,
                seed + 1,
                "teacher",
                params=found.get("teacher_base"),
                hinted=float(bool(teacher.prompt)),
            )
        return found

    def _trained(self, *path):
        """A model whose parameters the beginning of the run has left."""
        params = self.initial
        for name in path:
            if name not in (*params, "reference"):
                kind = {"reverse": "dpo:STEPS", "teacher_base": "sft:STEPS"}.get(name, name)
                raise ConfigError(
                    f"{self.config.paper} asks for the model {name!r}, which config.teacher="
                    f"{self.config.teacher!r} does not make: set it to {kind}."
                )
            params = params["params" if name == "reference" else name]
        return self.model, (self.layout.place(params), self.frozen)

    def _teacher(self):
        kind = self.teacher.weights
        if kind in ("sft", "dpo"):
            return self._trained("teacher")
        if kind == "start":
            return self._trained("params")
        if kind == "ema" and not self.config.ema:
            raise ConfigError("teacher=ema needs an average: set config.ema, e.g. 0.99.")
        if kind in ("ema", "self", "domains", "merge"):
            return kind
        if not kind:
            raise ConfigError(
                f"{self.config.paper} asks for a teacher: set config.teacher to a model "
                f"directory, or to one of {', '.join(teachers.KINDS)} (see research.teachers)."
            )
        model, params = load(kind, self.tokenizer, seed=0)
        record = self.task.train(0)
        teachers.check_tokenizer(
            kind,
            load_tokenizer(kind, "", self.task.alphabet),
            self.tokenizer,
            record.prompt + self.task.demonstration(record),
        )
        trainable, frozen = lora.partition(params)
        return model, (self.layout.place(trainable), self.layout.place(frozen))

    def _source(self, name):
        found = "self" if name == "policy" else self.sources[name]
        if found == "merge":
            return self.model, (self._merged(), self.frozen)
        if isinstance(found, str):
            moving = {"self": self.state.params, "ema": self.state.ema}
            return self.model, (moving[found], self.frozen)
        return found

    def _merged(self):
        """The merge of the latest policies, made once a step."""
        if self._merge is None or self._merge[0] != self.step:
            latest = [self.layout.fetch(p) for p in (*self.past, self.state.params)]
            merge = teachers.merged(self.initial["params"], latest)
            self._merge = self.step, self.layout.place(merge)
        return self._merge[1]

    def _statistics(self, context, source, names, rollout):
        """Statistics of the batch (or of another rollout), under the prompt that a source reads."""
        other = context.rollout if rollout is None else rollout
        if source == "teacher" and self.teacher.prompt and rollout is None:
            prompts = CONTEXTS[self.teacher.prompt](context)
            return self.rescore(source, names, other, prompts)
        if source == "teacher" and self.teacher.weights == "domains":
            by_domain = {d: self.score(f"teacher/{d}", names, other) for d in self.task.domains}
            chosen = [teacher_of(r.info["domain"], by_domain) for r in other.records]
            return {n: np.stack([c[n][row] for row, c in enumerate(chosen)]) for n in names}
        return self.score(source, names, other)

    # -- compiled functions ----------------------------------------------------------------------

    def _cached(self, key, make):
        if key not in self._compiled:
            self._compiled[key] = make()
        return self._compiled[key]

    def score(self, source, names, rollout) -> dict[str, np.ndarray]:
        """Statistics of a rollout's responses under a model, on the host."""
        return self._scored(*self._source(source), names, rollout)

    def _scored(self, model, placed, names, rollout):
        names, size = tuple(names), self._sharing(model, names, rollout)
        # Whole groups are spread over devices: a shared prompt stays with its responses.
        rows = {k: v.reshape(-1, size, *v.shape[1:]) for k, v in rollout.model_rows().items()}
        width, length = rows["tokens"].shape[-1], rollout.tokens.shape[1]

        def make():
            def function(placed, rows):
                return statistics(
                    model,
                    lora.combine(*placed),
                    {k: v.reshape(-1, *v.shape[2:]) for k, v in rows.items()},
                    names,
                    prompt_length=width - length,
                    temperature=self.config.sampling.temperature,
                    chunk=self.config.update.head_chunk,
                    group_size=size,
                )

            return self.layout.map_rows(function, rows_per_row=size)

        key = ("score", model, names, width, length, size)
        out = self._cached(key, make)(placed, rows)
        return {k: np.asarray(v) for k, v in out.items()}

    def _sharing(self, model, names, rollout) -> int:
        """The group size if it pays to read a prompt once for all responses to it, else 1."""
        size, (rows, width) = self.config.group_size, rollout.prompts.shape
        pays = scoring.sharing_pays(model, width, rollout.tokens.shape[1], size)
        if not pays or rows % size or "mtp_logprobs" in names:
            return 1
        for array in (rollout.prompts, rollout.prompt_positions):
            grouped = array.reshape(-1, size, width)
            if (grouped != grouped[:, :1]).any():
                return 1  # prompts that differ from response to response, such as hints
        return size

    def rescore(self, source, names, rollout, prompts) -> dict[str, np.ndarray]:
        """Statistics of a rollout's responses under other prompts, one text per row."""
        records = [Record(p, "") for p in prompts]
        _, (tokens, positions) = self._encoded(records, self.context_width)
        other = dataclasses.replace(rollout, prompts=tokens, prompt_positions=positions)
        return self.score(source, names, other)

    def measure(self, source, function, rollout, more) -> dict[str, np.ndarray]:
        """What a function (model config, params, rows) makes of a rollout's sequences."""
        model, placed = self._source(source)
        rows = {**rollout.model_rows(), "mask": rollout.mask, **more}

        def make():
            return self.layout.map_rows(
                lambda placed, rows: function(model, lora.combine(*placed), rows)
            )

        out = self._cached(("measure", function, model), make)(placed, rows)
        return {k: np.asarray(v) for k, v in out.items()}

    def sample(self, placed, prompts, positions, keys, *, group_size, temperature=None, model=None):
        """Samples groups of responses; arrays on the host."""
        s = self.config.sampling
        temperature = s.temperature if temperature is None else temperature
        dtype = self.config.sampler_dtype
        model = model or self.model
        model = override(model, dtype=dtype) if dtype else model
        allowed = ro.allowed_tokens(self.tokenizer, s.allowed, s.max_new_tokens)

        def make():
            def function(placed, rows):
                params = lora.combine(*placed)
                if dtype:
                    params = jax.tree.map(lambda x: x.astype(dtype), params)
                words = rows["keys"].reshape(-1, *rows["keys"].shape[2:])
                out = sampling.sample(
                    model,
                    params,
                    rows["prompts"],
                    rows["positions"],
                    jax.random.wrap_key_data(words),
                    group_size=group_size,
                    max_new_tokens=s.max_new_tokens,
                    temperature=temperature,
                    top_k=s.top_k,
                    top_p=s.top_p,
                    min_p=s.min_p,
                    stop_tokens=tuple(self.tokenizer.stop_ids),
                    pad_id=self.tokenizer.pad_id,
                    allowed=allowed,
                )
                return {
                    "tokens": out.tokens,
                    "mask": out.mask,
                    "logprobs": out.logprobs,
                    "truncated": out.truncated,
                }

            return self.layout.map_rows(function, rows_per_row=group_size)

        keys = keys.reshape(len(prompts), group_size, *keys.shape[1:])
        rows = {"prompts": prompts, "positions": positions, "keys": keys}
        out = self._cached(("sample", group_size, temperature, model), make)(placed, rows)
        return {k: np.asarray(v) for k, v in out.items()}

    def _update(self, total_rows, sharing):
        """The compiled update for minibatches of this many rows, `sharing` of them a prompt."""

        def make():
            token, streams, loss = streamed(self.composed)
            heads = {s: self._source(s)[0] for s in streams}

            def rows_to_statistics(params, frozen, rows):
                others = {s: (heads[s], frozen["heads"][s], rows[f"{s}_hidden"]) for s in streams}
                combined = lora.combine(params, frozen["frozen"])
                out = statistics(
                    self.model,
                    combined,
                    rows,
                    [n for n in self.gradients if n not in signals.SEQUENCES],
                    prompt_length=self.config.sampling.max_prompt_tokens,
                    temperature=self.config.sampling.temperature,
                    chunk=self.config.update.head_chunk,
                    group_size=sharing,
                    extra={"streamed": token} if token else None,
                    others=others,
                )
                for name in (n for n in self.gradients if n in signals.SEQUENCES):
                    prompts, tokens = rows[f"{name}/prompts"], rows[f"{name}/tokens"]
                    other = {
                        "tokens": jnp.concatenate([prompts, tokens], axis=1),
                        "positions": rows[f"{name}/positions"],
                    }
                    out[name] = statistics(
                        self.model,
                        combined,
                        other,
                        ("logprobs",),
                        prompt_length=prompts.shape[1],
                        temperature=self.config.sampling.temperature,
                        chunk=self.config.update.head_chunk,
                    )["logprobs"]
                return {**out, **out.pop("streamed", {})}

            def loss_of_batch(found, constants):
                arrays = {**constants, **found}
                credited = self.composed.prepare(arrays, self.late)
                value, metrics = loss({**arrays, **credited["arrays"]})
                return value, {**credited["metrics"], **metrics}

            return self.layout.compile_update(
                update.make_update(
                    rows_to_statistics,
                    loss_of_batch,
                    self.optimizer,
                    total_rows=total_rows,
                    microbatches=self.config.update.microbatches,
                    axis=self.layout.axis,
                    ema=self.config.ema,
                )
            )

        return self._cached(("update", total_rows, sharing), make)

    # -- one step --------------------------------------------------------------------------------

    def sampler_params(self, step):
        """The parameters to sample from: stale, in another type or noisy, as configured."""
        age = min(self.config.staleness, len(self.past))
        params = self.past[-age] if age else self.state.params
        if not self.config.sampler_noise:
            return (params, self.frozen)

        def perturb(tree, key):
            leaves, structure = jax.tree.flatten(tree)
            keys = jax.random.split(key, len(leaves))
            scale = self.config.sampler_noise
            noisy = [
                x * (1 + scale * jax.random.normal(k, x.shape, x.dtype))
                for x, k in zip(leaves, keys)
            ]
            return jax.tree.unflatten(structure, noisy)

        key = jax.random.fold_in(jax.random.key(self.config.seed + 7), step)
        noisy = self._cached("noise", lambda: self.layout.map_params(perturb))
        return (noisy(params, key), self.frozen)

    def respond(self, placed, records, ids, step, *, group_size, seed, temperature=None):
        """Samples and grades responses to task records."""
        config, pad = self.config, self.tokenizer.pad_id
        _, (prompts, positions) = self._encoded(records)
        keys = ro.response_keys(seed, step, ids, group_size)
        per_row = [r for r in records for _ in range(group_size)]
        rows = np.arange(len(per_row))

        def spoken(out):
            texts = self._decoded(out)
            return out, texts, self._graded(texts, per_row)

        turns = [
            spoken(
                self.sample(
                    placed, prompts, positions, keys, group_size=group_size, temperature=temperature
                )
            )
        ]
        prompts, positions = (np.repeat(x, group_size, axis=0) for x in (prompts, positions))
        last, replies = np.zeros(len(per_row), int), []
        for turn in range(1, self.turns):
            said = [
                self.task.reply(record, text) if last[row] == turn - 1 else None
                for row, (record, text) in enumerate(zip(per_row, turns[-1][1]))
            ]
            last += [text is not None for text in said]
            replies.append([self._reply_tokens(text) for text in said])
            width = turn * (config.sampling.max_new_tokens + config.sampling.max_reply_tokens)
            so_far = ro.episode([out for out, _, _ in turns], replies, width, pad)
            context = ro.history(prompts, positions, so_far, pad)
            out = self.sample(
                placed,
                *context,
                np.asarray(ro.turn_keys(keys, turn)),
                group_size=1,
                temperature=temperature,
            )
            turns.append(spoken(out))

        def of_last(arrays):
            return np.stack(arrays)[last, rows]

        outs, texts, graded = zip(*turns)
        final = [texts[k][row] for row, k in enumerate(last)]
        components = {
            k: of_last([g["components"][k] for g in graded]) for k in graded[0]["components"]
        }
        took_place = np.arange(self.turns) <= last[:, None]
        return ro.Rollout(
            prompts=prompts,
            prompt_positions=positions,
            **ro.episode(outs, replies, self.response_width, pad),
            truncated=of_last([out["truncated"] for out in outs]),
            group_ids=np.repeat(np.asarray(ids, np.int32), group_size),
            records=per_row,
            texts=final,
            rewards=of_last([g["total"] for g in graded]),
            components=components,
            correct=self._verdict(final, per_row, components),
            errors=sum(sum(g["errors"].values()) for g in graded),
            turn_rewards=np.stack([g["total"] for g in graded], axis=1) * took_place,
            turn_texts=[[texts[k][row] for k in range(n + 1)] for row, n in enumerate(last)],
        )

    def _reply_tokens(self, text):
        """The tokens of an environment's reply, or None for the end of the episode."""
        if text is None:
            return None
        ids, width = self.tokenizer.encode(text), self.config.sampling.max_reply_tokens
        if len(ids) > width:
            raise ConfigError(
                f"A reply of {len(ids)} tokens does not fit config.sampling.max_reply_tokens="
                f"{width}: {text!r}. Raise the limit."
            )
        return ids

    def _encoded(self, records, width=None):
        """Rendered prompts, and their (tokens, positions), left-padded to a width (the run's)."""
        shown = [self.tokenizer.render(r.prompt, system=self.task.system) for r in records]
        width = width or self.config.sampling.max_prompt_tokens
        return shown, ro.encode_prompts(shown, self.tokenizer.encode, width, self.tokenizer.pad_id)

    def _decoded(self, out):
        return [
            self.tokenizer.decode([int(t) for t, m in zip(row, valid) if m])
            for row, valid in zip(out["tokens"], out["mask"])
        ]

    def _verdict(self, texts, records, components):
        """Whether the task's own verifier gives a response full marks, [B] of 0 and 1."""
        if isinstance(self.reward_weights.get(self.verifier), float):
            found = components[self.verifier]  # graded already, without parameters of the user's
        else:
            spec = {self.verifier: 1.0}
            found = self._graded(texts, records, spec, "zero")["components"][self.verifier]
        return (found >= 1.0).astype(np.float32)

    def _graded(self, texts, records, spec=None, on_error=None):
        """Grades by the run's rewards; of several processes, all go by the first one's grades."""
        graded = rewards.grade(
            texts,
            records,
            spec or self.reward_weights,
            on_error=on_error or self.config.on_reward_error,
            pool=self.pool,
        )
        return devices.agreed(graded)

    def rollout(self, step):
        """A batch of graded responses; with a selection stage, of prompts that it keeps."""
        config = self.config
        placed = self.sampler_params(step)
        kept, spare, generated, found = [], [], 0, 0
        for _ in range(config.selection.max_rounds if self.composed.selection else 1):
            records, ids = self.order.next(config.prompts_per_step)
            batch = self.respond(
                placed, records, ids, step, group_size=config.group_size, seed=config.seed
            )
            generated += len(records)
            batch = self._demonstrated(batch)
            if not self.composed.selection:
                return batch, {}
            # A selection may also leave out single responses, by the mask, of a kept prompt.
            keep = (self._kept(batch).reshape(-1, config.group_size) > 0).any(axis=1)
            found += int(keep.sum())
            for group, good in enumerate(keep):
                rows = np.arange(config.group_size) + group * config.group_size
                (kept if good else spare).append(batch.take(rows))
            if len(kept) >= config.prompts_per_step:
                break
        chosen = (kept + spare)[: config.prompts_per_step]
        return ro.joined(chosen), {"generated_prompts": generated, "kept_prompts": found}

    def _demonstrated(self, batch):
        """The batch with demonstrations in place of the last responses of each group."""
        size, count = self.config.group_size, self.config.demonstrations
        if not count:
            return batch
        if self.turns > 1 or count > size:
            raise ConfigError(
                f"demonstrations={count}: expected at most group_size={size}, and a task of one "
                f"turn ({self.task.name} has {self.turns})."
            )
        place = np.arange(len(batch))
        replaced = place % size >= size - count
        own = batch.take(place[replaced])
        texts = [self.task.demonstration(record) for record in own.records]
        shown = ro.answered(own, texts, self.tokenizer)
        shown.logprobs = self.score("policy", ("logprobs",), shown)["logprobs"] * shown.mask
        graded = self._graded(texts, own.records)
        shown.rewards, shown.components = graded["total"], graded["components"]
        shown.correct = self._verdict(texts, own.records, shown.components)
        shown.turn_rewards = graded["total"][:, None]
        order = np.argsort(np.concatenate([place[~replaced], place[replaced]]))
        return ro.joined([batch.take(place[~replaced]), shown]).take(order)

    def _kept(self, batch):
        keep = np.ones(len(batch), np.float32)
        for stage in self.composed.selection:
            arrays = signals.collect(stage.needs, self._context(batch))
            keep = keep * np.asarray(stage(arrays))
        return keep

    def _context(self, batch):
        def respond(records, ids, *, source="sampler", **settings):
            sampler = source == "sampler"
            placed = self.sampler_params(self.step) if sampler else self._source(source)[1]
            return self.respond(placed, records, ids, self.step, seed=self.config.seed, **settings)

        def greedy():
            first = np.arange(0, len(batch), self.config.group_size)
            answer = respond(
                [batch.records[i] for i in first],
                batch.group_ids[first],
                group_size=1,
                temperature=0.0,
            )
            return np.repeat(answer.rewards, self.config.group_size)

        def continuations(source, prompts, positions, *, group_size, salt):
            model, placed = self._source(source)
            ids = salt + np.arange(len(prompts))
            keys = ro.response_keys(self.config.seed, self.step, ids, group_size)
            return self.sample(placed, prompts, positions, keys, group_size=group_size, model=model)

        context = signals.Context(
            rollout=batch,
            asked=self.asked,
            statistics=lambda source, names, other=None: self._statistics(
                context, source, names, other
            ),
            rescore=lambda source, names, prompts: self.rescore(source, names, batch, prompts),
            respond=respond,
            measure=lambda function, source="policy", rollout=None, **more: self.measure(
                source, function, batch if rollout is None else rollout, more
            ),
            continuations=continuations,
            greedy_rewards=greedy,
            carried=self.carried,
            config=self.config,
            task=self.task,
            tokenizer=self.tokenizer,
            step=self.step,
        )
        return context

    def train_step(self, step) -> dict[str, float]:
        """One rollout and its updates; returns and records the logged scalars."""
        started = time.perf_counter()
        drawn, carried = self.order.state(), dict(self.carried)
        try:
            batch, logged = self.rollout(step)
            context = self._context(batch)
            arrays = signals.collect(self.needs, context)
            numbers = schedules.values(
                self.bound, step, self.config.steps, self.history[-1] if self.history else {}
            )
            prepared = self._prepare(arrays | numbers)
            arrays = {**arrays, **prepared["arrays"]}
            logged |= {k: float(v) for k, v in prepared["metrics"].items()}
            sequences = {
                n: signals.SEQUENCES[n](context) for n in self.gradients if n in signals.SEQUENCES
            }
        except BaseException:  # no update has begun: a resume takes the step again, from its start
            self.order.restore(drawn)
            self.carried = carried
            raise
        self.whole = False
        if self._kept_policies():
            self.past.append(jax.tree.map(jnp.array, self.state.params))
        logged |= self._optimise(step, context, arrays, sequences, numbers)
        seconds = time.perf_counter() - started
        tokens = float(batch.mask.sum())
        logged = {
            "reward": float(batch.rewards.mean()),
            "accuracy": float(batch.correct.mean()),
            "entropy": float(-(batch.logprobs * batch.mask).sum() / max(tokens, 1)),
            "length": tokens / len(batch),
            "truncated": float(batch.truncated.mean()),
            "reward_errors": float(batch.errors),
            **{f"reward/{k}": float(v.mean()) for k, v in batch.components.items()},
            **logged,
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
        }
        self.step = step + 1
        self.history.append(logged)
        self._record(self.step, logged)
        self.log(progress_line(self.step, self.config.steps, logged))
        self.whole = True
        if self.consecutive_skips >= self.config.max_skipped:
            raise RuntimeError(
                f"{self.consecutive_skips} consecutive updates had a non-finite loss or gradient "
                f"(loss {logged['loss']}, gradient norm {logged['grad_norm']}) and were skipped. "
                "Lower optimizer.learning_rate, or look at the ratios: the last parameters are "
                f"saved in {self.workdir}."
            )
        self._evaluate_if_due()
        return logged

    def _evaluate_if_due(self):
        """The evaluation after a step, unless the step has it already."""
        every, logged = self.config.evaluation.every, self.history[-1] if self.history else {}
        due = every and self.step and self.step % every == 0 and self.step < self.config.steps
        if due and not any(name.startswith("eval/") for name in logged):
            found = {f"eval/{k}": v for k, v in self.evaluate(self.step).items()}
            self._record(self.step, found)
            logged |= found

    def _record(self, step, scalars):
        if self.metrics is not None:
            self.metrics.write(step, scalars)

    def _prepare(self, arrays):
        stages = [*self.shaping, *self.crediting]
        if not stages:
            return {"arrays": {}, "metrics": {}}
        run = self._cached(
            "prepare", lambda: jax.jit(lambda given: self.composed.prepare(given, stages))
        )
        needed = needs_of(stages)
        extra = ["token_rewards"] if "token_rewards" in arrays else []
        return run({n: arrays[n] for n in {*needed, *extra, *self.bound}})

    def _optimise(self, step, context, arrays, sequences, numbers):
        """Epochs and minibatches over one rollout; whole groups stay together."""
        config, batch = self.config, context.rollout
        rows = batch.model_rows()
        for name, other in sequences.items():
            rows[f"{name}/prompts"], rows[f"{name}/tokens"] = other.prompts, other.tokens
            rows[f"{name}/positions"] = other.model_rows()["positions"]
        for source in self.streams:
            found = self._statistics(context, source, ("hidden",), None)
            rows[f"{source}_hidden"] = found["hidden"]
        heads = {
            s: {k: v for k, v in self._source(s)[1][0].items() if k in ("embed", "head")}
            | {k: v for k, v in self._source(s)[1][1].items() if k in ("embed", "head")}
            for s in self.streams
        }
        heads = jax.tree.map(jnp.array, heads)  # the policy's own are donated by the update
        frozen = {"frozen": self.frozen, "heads": heads}
        constants = {n: np.asarray(arrays[n]) for n in self.loss_needs if n in arrays} | numbers
        sharing = self._sharing(self.model, self.gradients, batch)
        groups = np.arange(len(batch)).reshape(-1, config.group_size)
        count = config.update.minibatches
        if len(groups) % count:
            raise ConfigError(
                f"update.minibatches={count} does not divide prompts_per_step={len(groups)}."
            )
        logs = []
        for epoch in range(config.update.epochs):
            order = np.arange(len(groups))
            if count > 1:
                order = np.random.default_rng((config.seed, step, epoch)).permutation(order)
            for part in np.split(order, count):
                picked = groups[part].reshape(-1)
                logs.append(self._one_update(rows, constants, frozen, picked, len(batch), sharing))
        return {k: float(np.mean([m[k] for m in logs])) for k in logs[0]}

    def _one_update(self, rows, constants, frozen, picked, total, sharing):
        multiple = self.layout.count * self.config.update.microbatches * sharing
        part = devices.pad_rows({k: v[picked] for k, v in rows.items()}, multiple)
        chosen = {
            k: v[picked] if np.ndim(v) and len(v) == total else v for k, v in constants.items()
        }
        function = self._update(len(picked), sharing)
        self.state, metrics = function(self.state, frozen, part, chosen)
        scalars = {k: float(v) for k, v in metrics["scalars"].items()}
        known = {n for s in self._loss_stages() for n in s.paper.arrays}
        for name, value in metrics["arrays"].items():
            if name in known:
                self.carried[name] = np.asarray(value)
        finite = scalars.pop("finite")
        self.consecutive_skips = 0 if finite else self.consecutive_skips + 1
        scalars["skipped"] = 1.0 - finite
        return scalars

    # -- supervised warm-up ----------------------------------------------------------------------

    def _supervised(self, steps, seed, what, *, params=None, accept=None, hinted=0.0):
        """Maximum likelihood on the task's demonstrations; returns host parameters.

        Args:
          steps, seed, what: how many updates, of which order of prompts, and what to call them.
          params: to start from; None: the initialisation.
          accept: whether to use a prompt.
          hinted: share of the prompts that stand behind the hint of the teacher's prompt.
        """
        composed, size = losses.paper("sft"), self.config.warmup.batch_size
        order = PromptOrder(self.task, seed, accept)
        mtp = ("mtp_logprobs",) if self.model.mtp_heads else ()

        def loss(arrays):
            value, metrics = composed.loss(arrays)
            for name in mtp:  # the extra head learns beside the main one
                value += composed.loss({**arrays, "logprobs": arrays[name]})[0]
            return value, metrics

        def batch():
            rows, mask = self._demonstrations(order.next(size)[0], hinted)
            return rows, {"mask": mask}

        return self._fitted(
            self.trainable if params is None else params,
            loss,
            batch,
            names=("logprobs", *mtp),
            steps=steps,
            total_rows=size,
            what=f"{what}: cross-entropy in nats",
        )

    def _preferred(self, start, steps, reverse=False):
        """DPO on pairs of a demonstration and a damaged copy of it; returns host parameters.

        Args:
          start: where it begins, and its reference.
          steps: updates.
          reverse: prefer the damaged ones.
        """
        size = self.config.warmup.batch_size // 2
        order = PromptOrder(self.task, self.config.seed + 3)
        composed = losses.paper("dpo")
        placed = self.layout.place(start)
        sides = [np.arange(size, dtype=np.int32), size + np.arange(size, dtype=np.int32)]
        chosen, rejected = sides[::-1] if reverse else sides

        def batch():
            records, _ = order.next(size)
            good = [self.task.demonstration(r) for r in records]
            bad = [damaged(text, f"{r.prompt}/{r.id}") for text, r in zip(good, records)]
            shown = ro.answered(self._unanswered(records * 2), good + bad, self.tokenizer)
            reference = self._scored(self.model, (placed, self.frozen), ("logprobs",), shown)
            return shown.model_rows(), {
                "mask": shown.mask,
                "ref_logprobs": reference["logprobs"],
                "chosen": chosen,
                "rejected": rejected,
            }

        return self._fitted(
            start,
            composed.loss,
            batch,
            names=("logprobs",),
            steps=steps,
            total_rows=2 * size,
            what="preferences" + " reversed" * reverse,
            rate=self.config.optimizer.learning_rate,
        )

    def _fitted(self, params, loss, batch, *, names, steps, total_rows, what, rate=None):
        """Parameters after some updates on batches () -> (rows, constants), on the host."""
        config = self.config
        if not steps:
            return self.layout.fetch(self.layout.place(params))
        optimizer = update.make_optimizer(
            ConfigDict(
                {
                    **_plain(config.optimizer),
                    "learning_rate": rate or config.warmup.learning_rate,
                    "schedule": "linear",
                    "warmup_steps": steps // 20,
                }
            ),
            steps,
        )

        def rows_to_statistics(params, frozen, rows):
            return statistics(
                self.model,
                lora.combine(params, frozen),
                rows,
                names,
                prompt_length=rows["tokens"].shape[1] - self.response_width,
                temperature=1.0,
                chunk=config.update.head_chunk,
            )

        function = self.layout.compile_update(
            update.make_update(
                rows_to_statistics,
                lambda found, constants: loss({**constants, **found}),
                optimizer,
                total_rows=total_rows,
                axis=self.layout.axis,
            )
        )
        state = self.layout.place(update.initial_state(params, optimizer, False))
        for step in range(steps):
            rows, constants = batch()
            rows = devices.pad_rows(rows, self.layout.count)
            state, metrics = function(state, self.frozen, rows, constants)
            if (step + 1) % max(steps // 4, 1) == 0:
                self.log(f"{what} {float(metrics['scalars']['loss']):.3f} ({step + 1}/{steps})")
        return self.layout.fetch(state.params)

    def _unanswered(self, records, width=None):
        """A rollout of prompts with empty responses."""
        prompts, positions = self._encoded(records, width)[1]
        rows = len(records)
        empty = np.zeros((rows, self.response_width))
        return ro.Rollout(
            prompts=prompts,
            prompt_positions=positions,
            tokens=empty.astype(np.int32),
            mask=empty.astype(np.float32),
            logprobs=empty.astype(np.float32),
            truncated=np.zeros(rows, bool),
            group_ids=np.arange(rows, dtype=np.int32),
            records=list(records),
            texts=[""] * rows,
        )

    def _demonstrations(self, records, hinted=0.0):
        s, tokenizer = self.config.sampling, self.tokenizer
        asked = records
        if hinted:
            asked = [self._hinted(r) if i < hinted * len(records) else r
                     for i, r in enumerate(records)]  # fmt: skip
        _, (prompts, positions) = self._encoded(asked, self.context_width if hinted else None)
        tokens = np.full((len(records), self.response_width), tokenizer.pad_id, np.int32)
        mask = np.zeros((len(records), self.response_width), np.float32)
        present = np.zeros_like(mask)
        for row, record in enumerate(records):
            begun = []  # an earlier attempt and the reply to it: read, but not imitated
            for attempt, reply in self.task.exchange(record) if self.turns > 1 else ():
                said = [*tokenizer.encode(attempt), tokenizer.eos_id][: s.max_new_tokens]
                begun += [*said, *self._reply_tokens(reply)]
            ids = [*tokenizer.encode(self.task.demonstration(record)), tokenizer.eos_id]
            ids = begun + ids[: s.max_new_tokens]
            tokens[row, : len(ids)] = ids
            mask[row, len(begun) : len(ids)] = present[row, : len(ids)] = 1
        empty = np.zeros(len(records))
        shown = ro.Rollout(
            prompts, positions, tokens, mask, mask, empty > 0, empty, records, [], present=present
        )
        return shown.model_rows(), mask

    def _hinted(self, record):
        hint = warmup_hint(self.teacher.prompt, self.task, record)
        return dataclasses.replace(record, prompt=hinted_prompt(self.task, hint, record.prompt))

    # -- evaluation ------------------------------------------------------------------------------

    def evaluate(self, step) -> dict[str, float]:
        """Greedy accuracy and sampled pass@k on held-out prompts."""
        config = self.config
        if not config.evaluation.prompts:
            return {}
        records = self.task.heldout(config.evaluation.prompts)
        ids = np.arange(len(records))
        placed, seed = self.served, config.seed + 1_000_003
        greedy = self.respond(placed, records, ids, 0, group_size=1, seed=seed, temperature=0.0)
        size = config.evaluation.samples
        sampled = self.respond(placed, records, ids, 0, group_size=size, seed=seed)
        found = evaluation.summary(
            sampled.texts,
            sampled.correct.reshape(-1, size),
            lengths=sampled.mask.sum(1),
            formatted=sampled.components.get("format"),
        )
        found = {k: float(v) for k, v in found.items()}
        return {"greedy_accuracy": float(greedy.correct.mean()), **found}

    def _report_evaluation(self, step, found):
        if found:
            shown = "  ".join(f"{k} {v:.3f}" for k, v in found.items())
            self.log(f"evaluation at step {step}: {shown}")

    def complete(self, prompts, *, system=None, samples=1, temperature=None, seed=0):
        """Samples responses to prompts of the user's own, as long as the model's context allows.

        Args:
          prompts: texts; a chat model gets them through its template.
          system: a system prompt, such as the task's; None leaves it to the template.
          samples: responses to each.
          temperature: None is the run's.
          seed: of the sampling.

        Returns:
          (rendered prompts, responses): N texts, and N lists of `samples` texts.

        Raises:
          ValueError: a prompt that is empty, or too long for the model's context.
        """
        shown = [self.tokenizer.render(prompt, system=system) for prompt in prompts]
        longest = max(len(self.tokenizer.encode(text)) for text in shown)
        room = self.model.max_length - self.config.sampling.max_new_tokens
        if longest > room:
            raise ValueError(
                f"A prompt of {longest} tokens and a response of "
                f"{self.config.sampling.max_new_tokens} exceed the model's context of "
                f"{self.model.max_length} tokens."
            )
        width = min(-(-longest // 16) * 16, room)  # few widths, so few compilations
        encoded = ro.encode_prompts(shown, self.tokenizer.encode, width, self.tokenizer.pad_id)
        keys = ro.response_keys(seed, 0, np.arange(len(prompts)), samples)
        out = self.sample(self.served, *encoded, keys, group_size=samples, temperature=temperature)
        texts = self._decoded(out)
        return shown, [texts[i : i + samples] for i in range(0, len(texts), samples)]

    # -- checkpoints -----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, on the host."""
        return {
            "state": self.layout.fetch(self.state),
            "past": [self.layout.fetch(p) for p in self.past],
            "carried": self.carried,
            "meta": {
                "step": self.step,
                "order": self.order.state(),
                "consecutive_skips": self.consecutive_skips,
                "before": self.before,
                "past": len(self.past),
            },
        }

    def _template(self):
        ema = self.config.ema > 0
        return jax.eval_shape(
            lambda params: update.initial_state(params, self.optimizer, ema), self.initial["params"]
        )

    def _restore(self, found):
        meta = found["meta"]
        self.state = self.layout.place(found["state"])
        for params in found["past"]:
            self.past.append(self.layout.place(params))
        self.carried = {k: np.asarray(v) for k, v in found["carried"].items()}
        self.step, self.before = meta["step"], meta["before"]
        self.consecutive_skips = meta["consecutive_skips"]
        self.order.restore(meta["order"])
        self.log(f"resumed from step {self.step} of {self.workdir}")

    def _continue_metrics(self):
        """Drops what was recorded after the checkpoint; reads what stands before it."""
        if self.metrics is not None:
            self.metrics.truncate(self.step)
        self.history = [
            {k: v for k, v in m.items() if k != "step"}
            for m in reporting.read_metrics(self.workdir)
            if 0 < m["step"] <= self.step
        ]
        self._evaluate_if_due()

    def finish(self, store) -> Result:
        """Final checkpoint, evaluation, table and picture."""
        after = self.evaluate(self.step)
        self._report_evaluation(self.step, after)
        found = {f"eval/{k}": v for k, v in after.items()}
        self._record(self.step, found)
        if self.history:
            self.history[-1] |= found
        store.save(self.step, self.snapshot())
        if self.metrics is not None:
            self.metrics.close()
            if after:
                self.log(reporting.final_table(self.before, after))
            self.log(f"report: {reporting.report_picture(self.workdir)}")
        params = lora.combine(self.layout.fetch(self.state.params), self.layout.fetch(self.frozen))
        return Result(self.workdir, self.before, after, self.history, params, self.model)


def progress_line(step, steps, logged) -> str:
    """One line per step: reward, accuracy, KL, entropy, clip fraction, tokens/s."""
    kl = logged.get("kl", logged.get("approx_kl", float("nan")))
    clip = logged.get("clip_fraction", float("nan"))
    return (
        f"step {step:>{len(str(steps))}}/{steps}  reward {logged['reward']:6.3f}  "
        f"accuracy {logged['accuracy']:.3f}  kl {kl:8.5f}  entropy {logged['entropy']:.3f}  "
        f"clip {clip:.3f}  length {logged['length']:.1f}  "
        f"{logged['tokens_per_second']:,.0f} tokens/s"
    )


def _silent(_):
    pass


def _plain(config) -> dict:
    return config.to_dict() if isinstance(config, ConfigDict) else dict(config)
