"""The catalogue: registration, lookup with did-you-mean, and composition of stages.

A paper registers one function with `@paper`. Its signature is its interface: positional arguments
are arrays (by the names of `losses.arrays`, or annotated with a jaxtyping type), keyword-only
arguments are hyperparameters with the paper's defaults. From that alone follow the checks of
every call, the signals a trainer has to supply, and the flags of a launcher.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from losses.arrays import ARRAYS, DIFFERENTIABLE
from losses.ops import masked, returns

# The rooms of the house that hold papers. The last lies above this package: it is imported by
# name on the first lookup, so that losses/ can be used (and imported) without it.
ROOMS = (
    "losses.baselines",
    "losses.surrogates",
    "losses.advantages",
    "losses.credit",
    "losses.turns",
    "losses.guidance",
    "losses.domains",
    "losses.distillation",
    "losses.preferences",
    "losses.rewards",
    "losses.regularizers",
    "research.papers",
)

STAGE_KINDS = ("selection", "reward", "advantage", "credit", "objective", "regularizer")
KINDS = STAGE_KINDS + (
    "rollout", "procedure", "decoding", "model", "environment", "evaluation", "analysis",
)  # fmt: skip


class CatalogueError(ValueError):
    """A name, array, shape or hyperparameter that the catalogue does not know."""


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns ' Did you mean ...?' for the closest of the known names, or an empty string."""
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


@dataclasses.dataclass(frozen=True)
class Paper:
    """One entry of the catalogue.

    Attributes:
      slug: the paper's name on the command line.
      function: the checked function that carries its contribution.
      kind: what the function is (one of `KINDS`).
      base: slug of the objective it plugs into by default, or "none".
      title, arxiv, year: bibliography.
      stages: other stages of the paper's own composition, e.g. `{"advantage": ("grpo_advantage",
        {"scale": "none"})}`; what is not named comes from the base.
      outputs: names of what the function returns: ("loss", "metrics") for objectives and
        regularizers, else the array it yields first, then any further ones.
      when: array name -> hyperparameter (or predicate over the hyperparameters) that must be
        truthy for that optional array to be needed.
      gradients: arrays through which the gradient flows.
      unmasked: standard [B,T,...] arrays that are also read where the mask is 0.
      split: for objectives over whole distributions, a pair (token function, reduction): the
        first maps logits to per-token statistics and can run in chunks of the vocabulary head,
        the second maps those statistics to (loss, metrics).
      metric: the name of the logged scalar in which the paper's mechanism shows.
    """

    slug: str
    function: Callable
    kind: str
    base: str
    title: str
    arxiv: str
    year: int | None
    stages: Mapping[str, Any]
    outputs: tuple[str, ...]
    when: Mapping[str, str | Callable]
    gradients: tuple[str, ...]
    unmasked: tuple[str, ...]
    split: tuple[Callable, Callable] | None
    metric: str | None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def module(self) -> str:
        return self.function.__module__

    @property
    def arrays(self) -> dict[str, inspect.Parameter]:
        """The function's array arguments, in order."""
        return {n: p for n, p in _parameters(self.function).items() if p.kind != p.KEYWORD_ONLY}

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyperparameters with their defaults."""
        parameters = _parameters(self.function).items()
        return {n: p.default for n, p in parameters if p.kind == p.KEYWORD_ONLY}

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the arrays that a call with the default hyperparameters must supply."""
        return self.needs_with({})

    def needs_with(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays that a call with these hyperparameters must supply."""
        settings = {**self.hyper, **hyper}

        def needed(name, parameter):
            condition = self.when.get(name)
            if condition is None:
                return parameter.default is parameter.empty
            return bool(condition(settings) if callable(condition) else settings[condition])

        return tuple(n for n, p in self.arrays.items() if needed(n, p))


_PAPERS: dict[str, Paper] = {}
_FUNCTIONS: dict[str, str] = {}  # function name -> slug
_COMPANIONS: dict[str, Paper] = {}  # function name -> entry that is not listed


def paper(
    slug: str,
    *,
    kind: str,
    base: str = "none",
    title: str,
    arxiv: str = "none",
    year: int | None = None,
    stages: Mapping[str, Any] | None = None,
    outputs: Sequence[str] | None = None,
    when: Mapping[str, str | Callable] | None = None,
    gradients: Sequence[str] | None = None,
    unmasked: Sequence[str] = (),
    split: tuple[Callable, Callable] | None = None,
    metric: str | None = None,
    companion: bool = False,
) -> Callable[[Callable], Callable]:
    """Registers a function as a paper of the catalogue and returns it with its calls checked.

    See `Paper` for the arguments. A checked call converts its arrays (lists and numpy included;
    half-precision floats to float32, masks to floats), verifies names, ranks and the agreement of
    axes, stops the gradient of every array that is not in `gradients`, and then runs the function;
    under `jax.jit` all of this happens while tracing.

    A `companion` is a further function of a paper that can stand in a slot of its own: it is found
    by its name, and listed under no slug.

    Raises:
      CatalogueError: the slug or the function name is taken, or the kind is unknown.
    """
    if kind not in KINDS:
        raise CatalogueError(f"{slug}: unknown kind {kind!r}.{nearest(kind, KINDS)}")

    def register(function):
        _reject_duplicates(function.__name__ if companion else slug, function)
        names = list(_parameters(function))
        loss_like = kind in ("objective", "regularizer")
        entry = Paper(
            slug=slug,
            function=function,
            kind=kind,
            base=base,
            title=title,
            arxiv=arxiv,
            year=year,
            stages=dict(stages or {}),
            outputs=tuple(outputs or (("loss", "metrics") if loss_like else (_product(kind),))),
            when=dict(when or {}),
            gradients=tuple(
                gradients
                if gradients is not None
                else (n for n in names if loss_like and n in DIFFERENTIABLE)
            ),
            unmasked=tuple(unmasked),
            split=split,
            metric=metric,
        )

        @functools.wraps(function)
        def checked(*args, **kwargs):
            arrays, hyper = _bind(entry, args, kwargs)
            return function(**arrays, **hyper)

        entry = dataclasses.replace(entry, function=checked)
        if companion:
            _COMPANIONS[function.__name__] = entry
        else:
            _PAPERS[slug] = entry
            _FUNCTIONS[function.__name__] = slug
        return checked

    return register


def _reject_duplicates(slug, function):
    def same_place(other):
        return (other.module, other.name) == (function.__module__, function.__name__)

    name = function.__name__
    for taken in (_PAPERS.get(slug), _PAPERS.get(_FUNCTIONS.get(name)), _COMPANIONS.get(name)):
        if taken is not None and not same_place(taken):  # the same place: the module was reloaded
            raise CatalogueError(
                f"{slug} / {function.__name__} in {function.__module__}: the name is taken by "
                f"{taken.slug} / {taken.name} in {taken.module}."
            )


def _product(kind):
    return {"advantage": "advantages", "credit": "advantages", "reward": "rewards"}.get(
        kind, "keep" if kind == "selection" else "value"
    )


@functools.cache
def _parameters(function) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


# ---------------------------------------------------------------------------------------------
# Checked calls


def _bind(entry: Paper, args, kwargs):
    """Sorts a call's arguments into checked arrays and hyperparameters."""
    names = list(entry.arrays)
    if len(args) > len(names):
        raise CatalogueError(
            f"{entry.name} takes at most {len(names)} arrays by position ({', '.join(names)}) and "
            f"got {len(args)}; hyperparameters go by keyword: {_listing(entry.hyper)}."
        )
    given = dict(zip(names, args))
    for name, value in kwargs.items():
        if name in given:
            raise CatalogueError(f"{entry.name} got the array {name!r} twice.")
        if name not in entry.arrays and name not in entry.hyper:
            known = [*entry.arrays, *entry.hyper]
            raise CatalogueError(
                f"{entry.name} has no argument {name!r}.{nearest(name, known)} "
                f"Arrays: {', '.join(names)}; hyperparameters: {_listing(entry.hyper)}."
            )
        given[name] = value
    hyper = {n: given.pop(n) for n in list(given) if n in entry.hyper}
    unset = [n for n, d in entry.hyper.items() if d is inspect.Parameter.empty and n not in hyper]
    if unset:
        raise CatalogueError(f"{entry.name} needs the hyperparameters {', '.join(unset)}.")
    missing = [n for n in entry.needs_with(hyper) if given.get(n) is None]
    if missing:
        raise CatalogueError(
            f"{entry.name} needs the array{'s' * (len(missing) > 1)} {', '.join(missing)}; "
            f"given: {', '.join(n for n in given if given[n] is not None) or 'none'}."
        )
    return _cleaned(entry, _checked_arrays(entry, given)), hyper


def _listing(hyper):
    return ", ".join(f"{n}={v!r}" for n, v in hyper.items()) or "none"


def _checked_arrays(entry, given):
    sizes: dict[str, tuple[int, str]] = {}
    out = {}
    for name, value in given.items():
        if value is None:
            out[name] = None
            continue
        array = _converted(entry, name, value)
        # What a paper does not declare as a path of the gradient is a constant, wherever it is
        # used: no stop-gradient can be forgotten.
        out[name] = array if name in entry.gradients else jax.lax.stop_gradient(array)
        for axis, size in zip(_axes(entry, name, array), array.shape):
            if axis.isdigit():
                if int(axis) != size:
                    raise CatalogueError(
                        f"{entry.name}: {name} has shape {array.shape}, expected size {axis}."
                    )
            elif axis.isidentifier() and axis != "_":
                known, where = sizes.setdefault(axis, (size, name))
                if known != size:
                    raise CatalogueError(
                        f"{entry.name}: {name} has shape {array.shape}, so {axis} = {size}, but "
                        f"{where} has {axis} = {known}."
                    )
    return out


def _cleaned(entry, arrays):
    """Zeroes the standard per-token arrays where the mask is 0, whatever stood there."""
    mask = arrays.get("mask")
    if mask is None or mask.ndim != 2:
        return arrays
    out = dict(arrays)
    for name, value in arrays.items():
        if value is None or name == "mask" or name not in ARRAYS or name in entry.unmasked:
            continue
        if (axes(entry.function, name) or ())[:2] == ("B", "T") and jnp.issubdtype(
            value.dtype, jnp.floating
        ):
            out[name] = masked.select(value, mask[..., None] if value.ndim == 3 else mask)
    return out


def annotation(function: Callable, name: str):
    """Returns the jaxtyping type of an array argument, or None if it has none."""
    declared = _parameters(function)[name].annotation
    if hasattr(declared, "dim_str"):
        return declared
    return ARRAYS[name][0] if name in ARRAYS else None


def axes(function: Callable, name: str) -> tuple[str, ...] | None:
    """Returns the axis names of an array argument ("B", "T", ...), or None if undeclared."""
    kind = annotation(function, name)
    return None if kind is None else tuple(kind.dim_str.split())


def _converted(entry, name, value):
    kind = annotation(entry.function, name)
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise CatalogueError(f"{entry.name}: {name} is not an array: {error}") from None
    integral = kind is not None and any(d.startswith(("int", "uint")) for d in kind.dtypes)
    if integral and array.size == 0:
        return array.astype(jnp.int32)  # an empty list has no integers to tell its type by
    if integral and jnp.issubdtype(array.dtype, jnp.floating):
        raise CatalogueError(f"{entry.name}: {name} must hold integers, got {array.dtype}.")
    if integral:
        return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array if jnp.finfo(array.dtype).bits >= 32 else array.astype(jnp.float32)
    if kind is None:
        return array
    return array.astype(jnp.result_type(float))


def _axes(entry, name, array):
    declared = axes(entry.function, name)
    if declared is None or "..." in declared:
        return ()
    if len(declared) != array.ndim:
        raise CatalogueError(
            f"{entry.name}: {name} has shape {array.shape}, expected [{', '.join(declared)}]."
        )
    return declared


# ---------------------------------------------------------------------------------------------
# Lookup


@functools.cache
def _discover() -> None:
    for room in ROOMS:
        try:
            package = importlib.import_module(room)
        except ModuleNotFoundError as error:
            if error.name and room.startswith(error.name):
                continue  # losses/ on its own
            raise
        for info in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{room}.{info.name}")


def papers() -> list[Paper]:
    """Returns every paper of the catalogue, sorted by slug."""
    _discover()
    return [_PAPERS[slug] for slug in sorted(_PAPERS)]


def entry(name: str) -> Paper:
    """Returns the catalogue entry of a slug or of a function name.

    Raises:
      CatalogueError: the name is neither; the message proposes the nearest ones.
    """
    _discover()
    if name in _COMPANIONS:
        return _COMPANIONS[name]
    slug = name if name in _PAPERS else _FUNCTIONS.get(name)
    if slug is None:
        known = [*_PAPERS, *_FUNCTIONS, *_COMPANIONS]
        raise CatalogueError(
            f"Unknown paper or function {name!r}.{nearest(name, known)} "
            f"`losses.papers()` lists all {len(_PAPERS)}."
        )
    return _PAPERS[slug]


def get(name: str) -> Callable:
    """Returns the bare function of a paper by its name (`"qae_advantage"`) or slug (`"qae"`).

    Raises:
      CatalogueError: no such function; the message proposes the nearest ones.
    """
    return entry(name).function


# ---------------------------------------------------------------------------------------------
# Composition


def named_outputs(found: Paper, out) -> dict[str, Any]:
    """Returns what a paper's function gave, by the names of its `outputs`."""
    return dict(zip(found.outputs, out)) if len(found.outputs) > 1 else {found.outputs[0]: out}


BOUND = ("run.", "last.")
"""Beginnings of the values that stand for a number that changes from step to step."""


def is_bound(value) -> bool:
    """Whether a hyperparameter's value names a number of the environment ("run.step")."""
    return isinstance(value, str) and value.startswith(BOUND)


def bound(hyper: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces every "run.NAME" and "last.NAME" among hyperparameters by `env` of that name.

    Raises:
      CatalogueError: the environment has no such number.
    """
    for name, value in hyper.items():
        if is_bound(value) and value not in env:
            raise CatalogueError(
                f"{name}={value!r} stands for a number that the caller has to give; given: "
                f"{', '.join(n for n in env if n.startswith(BOUND)) or 'none'}."
            )
    return {name: env[value] if is_bound(value) else value for name, value in hyper.items()}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A function of the catalogue (or of the user's own) with some hyperparameters set."""

    paper: Paper
    hyper: Mapping[str, Any]

    @property
    def needs(self):
        return self.paper.needs_with(self.hyper)

    @property
    def settings(self):
        """All hyperparameters, defaults included."""
        return {**self.paper.hyper, **self.hyper}

    def __call__(self, env):
        wanted = {n: env[n] for n in self.paper.arrays if env.get(n) is not None}
        return self.paper.function(**wanted, **bound(self.hyper, env))

    def named(self, env) -> dict[str, Any]:
        """Runs the stage and returns its outputs by name."""
        return named_outputs(self.paper, self(env))


@dataclasses.dataclass(frozen=True)
class Composed:
    """Stages joined into one pure function `(**arrays) -> (loss, metrics)`.

    Data flows selection -> reward -> advantage -> credit -> objective + regularizers. Each stage
    reads the arrays of its signature from what the caller gave and from what the stages before
    it produced. `needs` is what the caller must give.
    """

    selection: tuple[Stage, ...] = ()
    reward: tuple[Stage, ...] = ()
    advantage: Stage | None = None
    credit: tuple[Stage, ...] = ()
    objective: Stage | None = None
    regularizers: tuple[Stage, ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in the order in which they run."""
        advantage = (self.advantage,) if self.advantage else ()
        objective = (self.objective,) if self.objective else ()
        return (*self.shaping, *advantage, *self.credit, *objective, *self.regularizers)

    @property
    def shaping(self) -> tuple[Stage, ...]:
        return (*self.selection, *self.reward)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the arrays that a caller must supply."""
        return needs_of(self.stages)

    def prepare(self, arrays: Mapping[str, Any], stages: Sequence[Stage]) -> dict[str, Any]:
        """Runs stages that come before the objective; returns the arrays and metrics they add."""
        env, added = dict(arrays), {}
        metrics: dict[str, Any] = {}
        for stage in stages:
            out = _settle(stage, stage.named(env), env, metrics)
            env.update(out)
            added.update(out)
        return {"arrays": added, "metrics": metrics}

    def loss(self, arrays: Mapping[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        """Evaluates objective and regularizers on arrays that hold everything they ask for."""
        total, metrics = self.objective(arrays)
        metrics = dict(metrics)
        for stage in self.regularizers:
            extra, logged = stage(arrays)
            total = total + extra
            metrics.update(logged)
        return total, metrics

    def __call__(self, **arrays) -> tuple[jax.Array, dict[str, Any]]:
        """Evaluates the composition.

        Raises:
          CatalogueError: an array is missing, unknown to the whole catalogue, or misshaped.
        """
        known = known_arrays()
        for name in arrays:
            if name not in known and name not in self.needs:
                raise CatalogueError(f"Unknown array {name!r}.{nearest(name, sorted(known))}")
        missing = [n for n in self.needs if arrays.get(n) is None]
        if missing:
            raise CatalogueError(
                f"The composition needs {', '.join(missing)}; it asks for "
                f"{', '.join(self.needs)} and got {', '.join(arrays) or 'none'}."
            )
        before = [s for s in self.stages if s is not self.objective and s not in self.regularizers]
        prepared = self.prepare(arrays, before)
        loss, metrics = self.loss({**arrays, **prepared["arrays"]})
        return loss, {**prepared["metrics"], **metrics}

    def describe(self) -> dict[str, Any]:
        """Returns the stages and all their hyperparameters as plain data."""

        def one(stage):
            return {"function": stage.paper.name, **stage.settings}

        out: dict[str, Any] = {}
        for slot in ("selection", "reward", "credit", "regularizers"):
            if getattr(self, slot):
                out[slot] = [one(s) for s in getattr(self, slot)]
        for slot in ("advantage", "objective"):
            if getattr(self, slot):
                out[slot] = one(getattr(self, slot))
        return out


def _settle(stage, out, env, metrics):
    """Turns a stage's outputs into arrays for the stages behind it, and logs its scalars."""
    kind, settled = stage.paper.kind, {}
    mask = env.get("mask")
    for name, value in out.items():
        if name == "metrics":
            metrics.update(value)
        elif kind == "selection" and name == "keep":
            settled["mask"] = jnp.asarray(mask) * value[:, None]
            metrics["kept_fraction"] = jnp.mean(value)
        elif name == "advantages":
            value = value if value.ndim == 2 else masked.rows_to_tokens(value, mask)
            settled[name] = jax.lax.stop_gradient(masked.select(value, mask))
            metrics["advantage_abs"] = masked.masked_mean(jnp.abs(settled[name]), mask)
        else:
            settled[name] = jax.lax.stop_gradient(value)
    if kind == "reward" and "rewards" in settled and "token_rewards" in env:
        settled["token_rewards"] = returns.outcome_to_tokens(settled["rewards"], mask)
    return settled


def needs_of(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Returns the arrays a sequence of stages reads that none of the earlier stages makes."""
    needs, made = {}, set()
    for stage in stages:
        needs.update({n: None for n in stage.needs if n not in made})
        made.update(stage.paper.outputs)
        if stage.paper.kind == "selection" or "advantages" in stage.paper.outputs:
            needs.setdefault("mask", None)
    return tuple(needs)


@functools.cache
def known_arrays() -> frozenset[str]:
    """Returns every array name that some function of the catalogue takes."""
    return frozenset(ARRAYS) | {n for p in [*papers(), *_COMPANIONS.values()] for n in p.arrays}


_SLOT_KINDS = {
    "selection": ("selection",),
    "reward": ("reward",),
    "advantage": ("advantage",),
    "credit": ("credit",),
    "objective": ("objective",),
    "regularizers": ("regularizer",),
}
_LISTS = ("selection", "reward", "credit", "regularizers")


def _stage(slot, spec) -> Stage:
    """Builds a stage from a name, a function, or a pair of either with hyperparameters."""
    if isinstance(spec, Stage):
        return spec
    what, hyper = spec if _is_pair(spec) else (spec, {})
    if callable(what):
        name = what.__name__
        found = _COMPANIONS.get(name) or _PAPERS.get(_FUNCTIONS.get(name))
        if found is None or found.function is not what:
            found = _own(slot, what)
    else:
        found = entry(what)
    if found.kind not in _SLOT_KINDS[slot]:
        fitting = [p.slug for p in papers() if p.kind in _SLOT_KINDS[slot]]
        raise CatalogueError(
            f"{what} is of kind {found.kind} and cannot be the {slot} stage. "
            f"Of that kind: {', '.join(fitting)}."
        )
    stage = Stage(found, {})
    return _with_hyper(stage, hyper)


def _is_pair(spec):
    return isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], Mapping)


def _own(slot, function) -> Paper:
    """Wraps a user's function, unregistered, as an entry for one slot."""
    kind = _SLOT_KINDS[slot][0]
    loss_like = kind in ("objective", "regularizer")
    made = Paper(
        slug=function.__name__,
        function=function,
        kind=kind,
        base="none",
        title=function.__name__,
        arxiv="none",
        year=None,
        stages={},
        outputs=("loss", "metrics") if loss_like else (_product(kind),),
        when={},
        gradients=tuple(n for n in _parameters(function) if n in DIFFERENTIABLE),
        unmasked=(),
        split=None,
        metric=None,
    )

    @functools.wraps(function)
    def checked(*args, **kwargs):
        arrays, hyper = _bind(made, args, kwargs)
        return function(**arrays, **hyper)

    return dataclasses.replace(made, function=checked)


def _with_hyper(stage, hyper) -> Stage:
    known = stage.paper.hyper
    for name in hyper:
        if name not in known:
            raise CatalogueError(
                f"{stage.paper.name} has no hyperparameter {name!r}.{nearest(name, list(known))} "
                f"It has: {_listing(known)}."
            )
    return Stage(stage.paper, {**stage.hyper, **hyper})


def _overridden(slot, default, change):
    """Applies to a slot's default what a caller gave: another stage, or hyperparameters only."""
    if change is None:
        return default
    if slot not in _LISTS:
        if isinstance(change, Mapping):
            if default is None:
                raise CatalogueError(f"There is no {slot} stage to set {dict(change)} on.")
            return _with_hyper(default, change)
        return _stage(slot, change)
    if not isinstance(change, Mapping):
        single = isinstance(change, (str, Stage)) or callable(change) or _is_pair(change)
        return tuple(_stage(slot, item) for item in ([change] if single else change))
    known = {name: s for s in default for name in (s.paper.name, s.paper.slug)}
    if not known:
        raise CatalogueError(f"There is no {slot} stage to set {dict(change)} on.")
    flat = not any(name in known for name in change)
    if flat and len(default) == 1 and set(change) <= set(default[0].paper.hyper):
        return (_with_hyper(default[0], change),)
    for name in change:
        if name not in known:
            raise CatalogueError(
                f"No {slot} stage {name!r}.{nearest(name, list(known))} "
                f"There is: {', '.join(s.paper.name for s in default)}."
            )
    return tuple(
        _with_hyper(s, change.get(s.paper.name) or change.get(s.paper.slug) or {}) for s in default
    )


def compose(
    *, selection=(), reward=(), advantage=None, credit=(), objective=None, regularizers=()
) -> Composed:
    """Joins stages into one pure function of arrays whose `needs` is the union of theirs.

    Args:
      selection, reward, credit, regularizers: sequences of stages (a single one is fine).
      advantage, objective: one stage each; `advantage=None` leaves `advantages` to the caller.
        A stage is the name of a function or of a paper, a function (the catalogue's or your own),
        or a pair of either with a dict of hyperparameters.

    Returns:
      A `Composed` function: `loss, metrics = composed(**arrays)`.

    Raises:
      CatalogueError: an unknown name or hyperparameter, a stage in the wrong slot, no objective,
        or stages that produce advantages for an objective that reads none.
    """
    if objective is None:
        raise CatalogueError("A composition needs an objective.")
    given = {"selection": selection, "reward": reward, "credit": credit}
    lists = {s: _overridden(s, (), v) for s, v in {**given, "regularizers": regularizers}.items()}
    composed = Composed(
        advantage=None if advantage is None else _stage("advantage", advantage),
        objective=_stage("objective", objective),
        **lists,
    )
    _check_flow(composed)
    return composed


def _check_flow(composed):
    target = composed.objective.paper
    shapes = [s for s in (composed.advantage, *composed.credit) if s is not None]
    readers = [target, *(s.paper for s in composed.regularizers)]
    if shapes and not any("advantages" in p.arrays for p in readers):
        raise CatalogueError(
            f"{', '.join(s.paper.name for s in shapes)} would have no effect: {target.name} reads "
            f"no advantages (it takes {', '.join(target.arrays)})."
        )


def paper_stages(slug: str) -> dict[str, Any]:
    """Returns the stages of a paper's own composition, by slot, as `Stage` objects.

    The paper's function fills the slot of its kind; the rest comes from its `stages`, then from
    its base. An objective that reads `advantages` and says nothing of where they come from gets
    `grpo_advantage`.
    """
    found = entry(slug)
    slots: dict[str, Any] = {s: () if s in _LISTS else None for s in _SLOT_KINDS}
    if found.kind != "objective":
        base = found.base if found.base != "none" else "grpo"
        slots.update(paper_stages(base))
        reads = set(found.arrays)
        if found.kind in ("advantage", "credit") and base == "ppo":
            # Advantages of its own, for PPO: the clipped surrogate on them. The critic is trained
            # beside it only where the paper's advantages come from a critic.
            critic = reads & {"values", "old_values"}
            slots["objective"] = (
                _stage("objective", "ppo_loss")
                if critic
                else _stage("objective", ("dapo_loss", {"clip_low": 0.2, "clip_high": 0.2}))
            )
            if found.kind == "credit" and slots["advantage"] is None:
                slots["advantage"] = _stage("advantage", "gae" if critic else "grpo_advantage")
    for slot, spec in found.stages.items():
        slots[slot] = _overridden(slot, slots[slot], spec)
    slot = {"regularizer": "regularizers"}.get(found.kind, found.kind)
    if slot in _LISTS:
        slots[slot] = (*slots[slot], Stage(found, {}))
    elif slot in slots:
        slots[slot] = Stage(found, {})
    objective = slots["objective"].paper
    default = "advantages" in objective.needs and "advantage" not in found.stages
    if default and slots["advantage"] is None:
        slots["advantage"] = _stage("advantage", "grpo_advantage")
    return slots


def paper_function(slug: str, **changes) -> Composed:
    """Returns a paper's own composition: its stage plugged into its base, as one function.

    Args:
      slug: the paper (or the name of its function).
      **changes: per slot (selection, reward, advantage, credit, objective, regularizers) either
        hyperparameters, as a dict, or another stage, as for `compose`. For the slots that hold
        several stages a dict maps a function's name to its hyperparameters.

    Returns:
      A `Composed` function: `loss, metrics = losses.paper("qae")(**arrays)`.

    Raises:
      CatalogueError: unknown names, slots or hyperparameters.
    """
    slots = paper_stages(slug)
    for slot, change in changes.items():
        if slot not in slots:
            raise CatalogueError(
                f"Unknown stage {slot!r}.{nearest(slot, list(slots))} Stages: {', '.join(slots)}."
            )
        slots[slot] = _overridden(slot, slots[slot], change)
    composed = Composed(**slots)
    _check_flow(composed)
    return composed
