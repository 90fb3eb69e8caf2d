"""Signals of small networks that are trained along the run, on hidden states of the models.

Their parameters and optimizer state live in `Context.carried`, as one vector each.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from losses.credit.dense_irl import irl_discriminator_loss
from losses.ops.masked import masked_mean
from research.rollouts import Rollout, answered
from research.signals import Context, signal
from research.signals.prompts import first_rows
from research.signals.states import captured
from research.tasks import damaged


def unit(x):
    """Vectors of mean square 1: layers and models differ in the size of their states."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def demonstrated(context: Context) -> Rollout:
    """The task's demonstration to each prompt of the batch, one row per group."""
    rows = context.rollout.take(first_rows(context.rollout))
    return answered(rows, [context.task.demonstration(r) for r in rows.records], context.tokenizer)


def trained(context: Context, name: str, start, step, batches):
    """Takes a network through training steps and keeps it; returns (parameters before, after).

    Args:
      context: carries the network under its name.
      name: of the network.
      start: (params, optimizer state) of an untrained one, which also gives the structure.
      step: (state, *batch) -> state, for each of
      batches: tuples of arrays.
    """
    leaves, structure = jax.tree.flatten(start)
    state = start
    if name in context.carried:
        ends = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
        parts = zip(np.split(context.carried[name], ends), leaves)
        state = structure.unflatten([p.reshape(x.shape).astype(x.dtype) for p, x in parts])
    before = state
    for batch in batches:
        state = step(state, *batch)
    context.carried[name] = np.concatenate(
        [np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(state)]
    )
    return before[0], state[0]


# -- RLFR: a flow from one hidden state to the next ------------------------------------------------

TAU = 0.8
"""Time at which deviations are measured."""
FLOW_RATE, FLOW_STEPS = 1e-3, 100
"""Learning rate of the flow network, and its steps on demonstrations before the first update."""
HOOKS = (0.25, 0.5, 0.75)
"""Relative depths of the layers whose states flow."""


class Flow(nn.Module):
    """Velocity of the flow towards the next state: a residual MLP, modulated by time and layer."""

    blocks: int = 2

    @nn.compact
    def __call__(self, x, tau, given, depth):
        """x and given [..., D], tau and depth broadcastable to [..., 1]."""
        size = x.shape[-1]
        frequencies = 2.0 ** jnp.arange(4)
        shape = (*x.shape[:-1], len(frequencies))
        angles = [jnp.broadcast_to(at * frequencies, shape) for at in (tau, depth)]
        waves = [wave(angle) for wave in (jnp.sin, jnp.cos) for angle in angles]
        condition = nn.silu(nn.Dense(size)(jnp.concatenate([given, *waves], axis=-1)))
        x = nn.Dense(size)(x)
        for _ in range(self.blocks):
            scale, shift, gate = jnp.split(nn.Dense(3 * size)(condition), 3, axis=-1)
            h = nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift
            x = x + gate * nn.Dense(size)(nn.silu(nn.Dense(2 * size)(h)))
        return nn.Dense(size)(x)


def flow_loss(params, key, pairs, depths, tau=None):
    """Squared error of the velocity, per token: [B,T], mean over layers and dimensions.

        noise e ~ N(0, I); x = tau h + (1 - tau) e; u = h - e; |F(x, tau, c, layer) - u|^2 / D

    Args:
      params: of `Flow`.
      key: of noise and times.
      pairs: context c and target h, [B,T,L,D] each.
      depths: [L] relative depths.
      tau: the time; None: uniform in [0, 1) for each token.
    """
    given, target = pairs
    noise_key, time_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, target.shape)
    times = jax.random.uniform(time_key, (*target.shape[:3], 1)) if tau is None else tau
    velocity = Flow().apply(
        params, times * target + (1 - times) * noise, jnp.asarray(times), given, depths[:, None]
    )
    return jnp.mean((velocity - (target - noise)) ** 2, axis=(-2, -1))


FLOW_OPTIMIZER = optax.adam(FLOW_RATE)


@functools.partial(jax.jit, static_argnums=0)
def fresh_flow(size):
    """An untrained flow network on states of a size, and its optimizer state."""
    sample = jnp.zeros(size)
    params = Flow().init(jax.random.key(0), sample, jnp.ones(1), sample, jnp.ones(1))
    return params, FLOW_OPTIMIZER.init(params)


@jax.jit
def flow_step(state, key, pairs, depths, mask):
    """One Adam step on the masked mean of `flow_loss` at random times."""
    params, moments = state

    def loss(params):
        return masked_mean(flow_loss(params, key, pairs, depths), mask)

    changes, moments = FLOW_OPTIMIZER.update(jax.grad(loss)(params), moments, params)
    return optax.apply_updates(params, changes), moments


@jax.jit
def flow_deviation(params, key, pairs, depths):
    """Velocity deviation of each token, tau / (1 - tau) times the error at a fixed time, [B,T]."""
    return TAU / (1 - TAU) * flow_loss(params, key, pairs, depths, tau=TAU)


def hooked(config, params, rows):
    """States of the hooked layers at each response token and the one before, [b,T,L,D] each.

    A model of few layers has fewer hooks. "depths" [b,L] are relative.
    """
    layers = sorted({min(int(share * config.num_layers), config.num_layers - 1) for share in HOOKS})
    names = tuple(f"hidden:{i}" for i in layers)
    found = captured(config, params, rows, names)
    states = unit(jnp.stack([found[name] for name in names], axis=2))
    length = rows["mask"].shape[1]
    depths = jnp.asarray(layers, jnp.float32) / config.num_layers
    return {
        "given": states[:, -length - 1 : -1],
        "target": states[:, -length:],
        "depths": jnp.broadcast_to(depths, (len(states), len(layers))),
    }


@signal("flow_scores")
def flow_scores(context: Context) -> np.ndarray:
    """Deviation of each token's state from the flow of good reasoning, [B,T] (rlfr).

    The network learns from demonstrations before the first update, then, after scoring a batch,
    from its right responses.
    """
    rollout = context.rollout
    key = jax.random.fold_in(jax.random.key(context.config.seed + 5), context.step)
    found = context.measure(hooked)
    pairs = found["given"], found["target"]
    depths = found["depths"][0]
    start = fresh_flow(pairs[0].shape[-1])
    if "flow" not in context.carried:
        shown = demonstrated(context)
        expert = context.measure(hooked, rollout=shown)
        batch = (expert["given"], expert["target"]), depths, shown.mask
        keys = jax.random.split(jax.random.fold_in(key, 1), FLOW_STEPS)
        trained(context, "flow", start, flow_step, [(k, *batch) for k in keys])
    right = rollout.mask * (rollout.correct > 0)[:, None]
    online = (jax.random.fold_in(key, 2), pairs, depths, right)
    before, _ = trained(context, "flow", start, flow_step, [online] if right.any() else [])
    return np.asarray(flow_deviation(before, key, pairs, depths)) * rollout.mask


# -- dense IRL: a discriminator of expert tokens ---------------------------------------------------

JUDGE_RATE, DAMAGED_COPIES = 1e-2, 2
"""Learning rate of the discriminator, and damaged copies of each expert trace."""


class Judge(nn.Module):
    """Logit that a token is the expert's, from the state after it."""

    @nn.compact
    def __call__(self, states):
        """[..., D] -> [...]."""
        return nn.Dense(1)(nn.gelu(nn.Dense(states.shape[-1])(states)))[..., 0]


def last_states(config, params, rows):
    """The last layer's states at the response tokens: {"states": [b,T,D]}."""
    name = f"hidden:{config.num_layers - 1}"
    return {
        "states": unit(captured(config, params, rows, (name,))[name])[:, -rows["mask"].shape[1] :]
    }


JUDGE_OPTIMIZER = optax.adam(JUDGE_RATE)


@functools.partial(jax.jit, static_argnums=0)
def fresh_judge(size, seed):
    """An untrained discriminator of states of a size, and its optimizer state."""
    params = Judge().init(jax.random.key(seed), jnp.zeros(size))
    return params, JUDGE_OPTIMIZER.init(params)


@jax.jit
def judged(params, states):
    """The discriminator's logits, [B,T,D] -> [B,T]."""
    return Judge().apply(params, states)


@jax.jit
def judge_step(state, states, mask, labels, weights):
    """One Adam step of the discriminator."""
    params, moments = state

    def loss(params):
        return irl_discriminator_loss(Judge().apply(params, states), mask, labels, weights)[0]

    changes, moments = JUDGE_OPTIMIZER.update(jax.grad(loss)(params), moments, params)
    return optax.apply_updates(params, changes), moments


@signal("token_rewards", given="irl_dense_advantage", models=("reference",))
def token_rewards(context: Context) -> np.ndarray:
    """Logits of a discriminator of expert traces from others, after its step, [B,T] (dense-irl).

    It reads states of the policy as it was at the start. Others are the policy's responses and
    two damaged copies of each expert trace.
    """
    rollout, size = context.rollout, context.config.group_size
    expert = demonstrated(context)
    copies = [
        answered(
            expert,
            [damaged(text, f"{context.step}/{n}/{row}") for row, text in enumerate(expert.texts)],
            context.tokenizer,
        )
        for n in range(DAMAGED_COPIES)
    ]
    own = np.arange(len(rollout)) % size < size - context.config.demonstrations

    def states(part):
        return context.measure(last_states, source="reference", rollout=part)["states"]

    policy = states(rollout)
    parts = [(policy, rollout.mask * own[:, None], 0.0, 1.0)]
    parts += [(states(part), part.mask, 0.0, 1.0) for part in copies]
    parts += [(states(expert), expert.mask, 1.0, 2.0 * own.sum() / len(expert))]
    batch = (
        np.concatenate([p[0] for p in parts]),
        np.concatenate([p[1] for p in parts]),
        *(np.concatenate([np.full(len(p[0]), p[k], np.float32) for p in parts]) for k in (2, 3)),
    )

    start = fresh_judge(policy.shape[-1], context.config.seed)
    _, params = trained(context, "judge", start, judge_step, [batch])
    return np.asarray(judged(params, policy)) * rollout.mask
