"""One gradient of the real transformer on any devices, with any micro-batches; memory falls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import losses
from models import init, lora, preset
from research import devices, update
from research.statistics import statistics, streamed

LAYOUTS = [(1, 4, ""), (8, 1, ""), (2, 2, ""), (1, 1, "data:2,fsdp:2,tensor:2")]
"""(devices, micro-batches, mesh), each compared with one device, one micro-batch."""

THOROUGH = ("grpo", "opd-full")
"""Papers that are tried in all layouts: one of sampled tokens, one of streamed distributions."""

DEFAULT = (*THOROUGH, "ppo", "kl-cov")
"""Papers of the default run, with value heads and batch quantiles; the others are slow tests."""

PAPERS = ("grpo", "dapo", "gspo", "ppo", "opd-full", "troll", "kl-cov", "entropy-bonus")
ROWS, PROMPT, LENGTH, VOCAB = 14, 3, 5, 21


def model_of(dtype, **fields):
    return preset("nano", vocab_size=VOCAB, dtype=dtype, param_dtype=dtype, **fields)


def parameters(config, seed):
    """Parameters none of which is zero, as adapters and value heads start out: the same numbers
    in any precision."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    return jax.tree.map(lambda x: (0.2 * random.normal(size=x.shape)).astype(x.dtype), shapes)


class Problem:
    """A paper's update of a transformer: parameters, rows of the batch, constants, functions."""

    def __init__(self, slug, dtype, **fields):
        random = np.random.default_rng(1)
        composed = losses.paper(slug)
        token, sources, self.loss_of = streamed(composed)
        stages = (composed.objective, *composed.regularizers)
        paths = {n for s in stages for n in s.paper.gradients} & set(composed.needs)
        self.names = sorted(paths - {"logits"}) if token else sorted(paths)
        config = model_of(dtype, value_head="values" in self.names, **fields)
        self.params, self.frozen = lora.partition(parameters(config, 2))
        other = model_of(dtype)
        self.others = {s: parameters(other, 3 + i) for i, s in enumerate(sources)}
        tokens = random.integers(0, VOCAB, (ROWS, PROMPT + LENGTH)).astype(np.int32)
        lengths = random.integers(1, LENGTH + 1, ROWS)
        mask = np.arange(LENGTH) < lengths[:, None]
        positions = np.tile(np.arange(PROMPT + LENGTH, dtype=np.int32), (ROWS, 1))
        positions[:, PROMPT:][~mask] = -1
        self.rows = {"tokens": tokens, "positions": positions}
        self.frozen = {"frozen": self.frozen, "heads": {}}
        for name, params in self.others.items():
            states = statistics(other, params, self.rows, ("hidden",), **self.settings())
            self.rows[f"{name}_hidden"] = np.asarray(states["hidden"])
            self.frozen["heads"][name] = {"embed": params["embed"]}

        def rows_to_statistics(params, frozen, rows):
            given = {s: (other, frozen["heads"][s], rows[f"{s}_hidden"]) for s in sources}
            found = statistics(
                config,
                lora.combine(params, frozen["frozen"]),
                rows,
                self.names,
                extra={"streamed": token} if token else None,
                others=given,
                **self.settings(),
            )
            return {**found, **found.pop("streamed", {})}

        self.statistics = rows_to_statistics
        now = rows_to_statistics(self.params, self.frozen, self.rows)
        near = functools.partial(random.normal, scale=0.2, size=(ROWS, LENGTH))
        groups = np.repeat(np.arange(ROWS // 2), 2).astype(np.int32)
        self.constants = {
            "mask": mask.astype(dtype),
            "group_ids": groups,
            "rewards": random.integers(0, 2, ROWS).astype(dtype),
            "advantages": (np.repeat(random.normal(size=(ROWS, 1)), LENGTH, 1) * mask).astype(
                dtype
            ),
            "token_rewards": (random.normal(size=(ROWS, LENGTH)) * mask).astype(dtype),
            "tokens": tokens[:, PROMPT:],
        }
        if "values" in now:
            self.constants["old_values"] = (np.asarray(now["values"]) + near()).astype(dtype)
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs"):
            if "logprobs" in now:
                self.constants[name] = (np.asarray(now["logprobs"]) + near()).astype(dtype)

    @staticmethod
    def settings():
        return {"prompt_length": PROMPT, "temperature": 0.7, "chunk": 16}

    def loss(self, found, constants):
        return self.loss_of({**constants, **found})


def gradient(problem, count, microbatches, mesh):
    plan = devices.layout(count, mesh)
    padded = devices.pad_rows(problem.rows, plan.count * microbatches)

    def compute(params, frozen, rows, constants):
        value, _, grads = update.loss_and_gradient(
            lambda p, part: problem.statistics(p, frozen, part),
            problem.loss,
            params,
            rows,
            constants,
            total_rows=ROWS,
            microbatches=microbatches,
            axis=plan.axis,
        )
        return grads, {"loss": value}

    run = plan.compile_update(compute)
    grads, metrics = run(
        plan.place(problem.params), plan.place(problem.frozen), padded, problem.constants
    )
    return np.asarray(metrics["loss"]), plan.fetch(grads)


def assert_equal(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize(
    "slug", [pytest.param(s, marks=[pytest.mark.slow] * (s not in DEFAULT)) for s in PAPERS]
)
def test_the_transformers_gradient_is_one(slug):
    with jax.enable_x64(True):
        problem = Problem(slug, "float64")
        expected = gradient(problem, 1, 1, "")
        assert {x.dtype for x in jax.tree.leaves(expected)} == {np.dtype("float64")}
        assert all(np.any(g != 0) for g in jax.tree.leaves(expected[1]))
        for layout in LAYOUTS if slug in THOROUGH else LAYOUTS[2:]:
            assert_equal(gradient(problem, *layout), expected, 1e-10)


@pytest.mark.parametrize("slug, fields", [("dapo", {}), ("ppo", {"lora_rank": 2})])
def test_the_transformers_gradient_is_one_in_float32(slug, fields):
    """To its rounding. Adapters train together with the value head; the trunk has no gradient."""
    problem = Problem(slug, "float32", **fields)
    single = gradient(problem, 1, 1, "")
    for layout in LAYOUTS[2:]:
        assert_equal(gradient(problem, *layout), single, 1e-5)
    with jax.enable_x64(True):
        assert_equal(single, gradient(Problem(slug, "float64", **fields), 1, 1, ""), 1e-4)
    trained = sum(x.size for x in jax.tree.leaves(single[1]))
    assert (trained < 2000) == bool(fields), trained


def test_the_optimizer_is_sharded_like_its_parameters():
    """Made so, and left so by updates; a device holds its share of a matrix and its moments."""
    plan = devices.layout(mesh="data:2,fsdp:2,tensor:2")
    problem, optimizer = Problem("grpo", "float32"), optax.adamw(1e-3)
    state = plan.initialise(
        lambda p: update.initial_state(p, optimizer, True), plan.place(problem.params)
    )
    step = plan.compile_update(
        update.make_update(
            problem.statistics, problem.loss, optimizer, total_rows=ROWS, microbatches=1, ema=0.9
        )
    )
    rows = devices.pad_rows(problem.rows, plan.count)
    states = [state.opt_state[0].mu, state.opt_state[0].nu, state.ema]
    for _ in range(2):
        for tree in states:
            like = jax.tree.map(lambda x: x.sharding, state.params)
            assert jax.tree.map(lambda x: x.sharding, tree) == like
        kernel = state.opt_state[0].mu["layers"]["block"]["mlp"]["gate"]["kernel"]
        assert kernel.addressable_shards[0].data.size == kernel.size // 4
        state, _ = step(state, plan.place(problem.frozen), rows, problem.constants)
        states = [state.opt_state[0].mu, state.opt_state[0].nu, state.ema]


def test_memory_falls_with_the_number_of_microbatches():
    """The peak of temporary memory, on a batch whose activations outweigh the gradient."""
    config = preset("nano", num_layers=4, hidden_size=64)
    params = init(config, jax.random.key(0))
    tokens = np.ones((64, 128), np.int32)
    rows = {"tokens": tokens, "positions": np.tile(np.arange(128, dtype=np.int32), (64, 1))}

    def temporary(microbatches):
        def compute(params, rows):
            return update.loss_and_gradient(
                lambda p, part: statistics(
                    config, p, part, ("logprobs",), prompt_length=8, temperature=1.0, chunk=512
                ),
                lambda found, _: (jnp.sum(found["logprobs"]), {}),
                params,
                rows,
                {},
                total_rows=64,
                microbatches=microbatches,
            )

        compiled = jax.jit(compute).lower(params, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one, four, sixteen = (temporary(n) for n in (1, 4, 16))
    assert four < one / 3 and sixteen < four / 2.5, (one, four, sixteen)
