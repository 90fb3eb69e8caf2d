"""Statistics of given responses under a model, in chunks of the vocabulary head.

A statistic is a function (logits [n,V], *other models' logits [n,V], token [n]) -> [n], or a pytree
of arrays [n,...]. `log_prob`, `entropy` and the divergences below are such functions.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from models import heads
from models.config import ModelConfig
from models.transformer import Transformer


def log_prob(logits, *rest):
    """Log-probability of the token: logits[token] - logsumexp(logits), nats.

    Args:
      logits: [..., V].
      *rest: other models' logits, which play no part, and last the tokens, [...] int.
    """
    picked = jnp.take_along_axis(logits, rest[-1][..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def entropy(logits, *_):
    """Entropy of softmax(logits), nats: [..., V] -> [...]."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def _kl(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def forward_kl(logits, other_logits, *_):
    """KL(other || model), nats: both [..., V] -> [...]; mass-covering when minimised."""
    return _kl(jax.nn.log_softmax(other_logits), jax.nn.log_softmax(logits))


def reverse_kl(logits, other_logits, *_):
    """KL(model || other), nats: both [..., V] -> [...]; mode-seeking when minimised."""
    return _kl(jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits))


def jensen_shannon(logits, other_logits, *_):
    """(KL(model || m) + KL(other || m)) / 2, m their mean, nats: both [..., V] -> [...]."""
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2


def sharing_pays(config: ModelConfig, prompt_length: int, length: int, group_size: int) -> bool:
    """Whether groups should be scored with one copy of their prompt (`response_hidden`).

    A prompt P and its group's G responses of T tokens, packed into one row, are fewer tokens than
    G rows of P + T; but each response then passes over the others in attention, so it pays where
    (P + G (T - 1))^2 <= G (P + T)^2. Rotary frequencies that depend on the width of the batch
    would change with it: models that have them are left alone.

    Args:
      config: the model.
      prompt_length: P.
      length: T.
      group_size: G.
    """
    packed = prompt_length + group_size * (length - 1)
    apart = group_size * (prompt_length + length) ** 2
    fixed = config.rope_type not in ("dynamic", "longrope")
    return group_size > 1 and fixed and packed**2 <= apart


def response_hidden(
    config: ModelConfig, params, tokens, positions, prompt_length: int, group_size=1, **kwargs
):
    """The hidden states that predict the response, and what else the forward pass captured.

    Args:
      config, params: the model.
      tokens, positions: [B, P+T] int32; prompts end in column P-1, responses begin in column P.
      prompt_length: P, at least 1.
      group_size: above 1, so many consecutive rows have the same prompt, which is then read once
        for all of them: they are packed into one row [prompt | response | response ...], where a
        response sees the prompt and itself. The same numbers to rounding, for fewer tokens.
      **kwargs: of the network: segment_ids, routes, capture; none with group_size above 1.

    Returns:
      hidden [B, T, D], whose row t predicts response token t, and captured, a dict of arrays over
      all P+T columns as the network returns them.

    Raises:
      ValueError: a prompt length that leaves no prompt or no response, rows that are not whole
        groups, or more asked of packed rows than their hidden states.
    """
    rows, width = tokens.shape
    if not 1 <= prompt_length < width:
        raise ValueError(
            f"prompt_length must lie in 1..{width - 1} for tokens of shape "
            f"{tokens.shape}, got {prompt_length}"
        )
    network = functools.partial(Transformer(config).apply, {"params": params})
    if group_size == 1:
        out = network(tokens, positions, **kwargs)
        return out.hidden[:, prompt_length - 1 : -1], out.captured
    if rows % group_size or any(value not in (None, ()) for value in kwargs.values()):
        raise ValueError(
            f"group_size={group_size} needs whole groups and no further arguments, got {rows} rows "
            f"and {sorted(kwargs)}"
        )

    def pack(x):
        """[B, P+T] -> [B / G, P + G (T-1)]: nothing is predicted from the last tokens."""
        x = x.reshape(rows // group_size, group_size, width)
        responses = x[:, :, prompt_length:-1].reshape(len(x), -1)
        return jnp.concatenate([x[:, 0, :prompt_length], responses], axis=1)

    member = jnp.repeat(jnp.arange(group_size), width - 1 - prompt_length)
    segments = jnp.concatenate([jnp.full(prompt_length, -1), member])
    packed = pack(tokens)
    out = network(packed, pack(positions), segment_ids=jnp.broadcast_to(segments, packed.shape))
    first = jnp.repeat(out.hidden[:, prompt_length - 1], group_size, axis=0)[:, None]
    others = out.hidden[:, prompt_length:].reshape(rows, -1, out.hidden.shape[-1])
    return jnp.concatenate([first, others], axis=1), {}


def token_statistics(
    config: ModelConfig,
    params,
    hidden,
    targets,
    functions: Mapping[str, Callable],
    *,
    others: Sequence[tuple] = (),
    temperature=1.0,
    chunk: int = 1024,
) -> dict:
    """Statistics of each target token, without ever holding logits [B, T, V].

    A scan over slices of the T axis computes the logits of a slice, divides them by the
    temperature, and applies the functions. The backward pass computes a slice's logits again, so
    memory is O(chunk V) in both directions. Slices span all rows: where rows are spread over
    devices, every device works on each slice.

    Args:
      config, params: the model.
      hidden: [B, T, D] final hidden states; row t predicts target t.
      targets: [B, T] int32.
      functions: name -> (logits [n,V], *others' logits [n,V], token [n]) -> [n] or a pytree of
        [n, ...], all float32.
      others: (config, params, hidden) of each further model; hidden [B, T, their D].
      temperature: divides the logits of every model.
      chunk: tokens per slice, rounded down to whole columns of B tokens, at least one column.

    Returns:
      name -> [B, T] or a pytree of [B, T, ...]; differentiable in params and hidden.

    Raises:
      ValueError: shapes that do not match, or a chunk below 1.
    """
    rows, length = targets.shape
    for name, states in [
        ("hidden", hidden),
        *((f"others[{i}]", o[2]) for i, o in enumerate(others)),
    ]:
        if states.ndim != 3 or states.shape[:2] != targets.shape:
            raise ValueError(
                f"{name}: expected hidden states [{rows}, {length}, D] for targets "
                f"{targets.shape}, got {states.shape}"
            )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    columns = min(max(chunk // rows, 1), length)
    slices = -(-length // columns)

    def split(x):
        """[B, T, ...] -> [slices, B, columns, ...], padded with zeros."""
        pad = [(0, 0), (0, slices * columns - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad).reshape(rows, slices, columns, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def join(x):
        """[slices, B columns, ...] -> [B, T, ...]; the inverse of `split` on flat slices."""
        x = jnp.moveaxis(x.reshape(slices, rows, columns, *x.shape[2:]), 0, 1)
        return x.reshape(rows, slices * columns, *x.shape[3:])[:, :length]

    models = [(config, params), *((c, p) for c, p, _ in others)]

    @jax.checkpoint
    def statistics(states, token):
        flat = [x.reshape(rows * columns, -1) for x in states]
        logits = [heads.logits(p, c, x) / temperature for (c, p), x in zip(models, flat)]
        token = token.reshape(-1)
        return {name: function(*logits, token) for name, function in functions.items()}

    states = [split(x) for x in (hidden, *(h for _, _, h in others))]
    _, out = jax.lax.scan(lambda _, xs: (None, statistics(*xs)), None, (states, split(targets)))
    return jax.tree.map(join, out)


def score(
    config: ModelConfig,
    params,
    tokens,
    positions,
    prompt_length: int,
    functions: Mapping[str, Callable],
    *,
    others: Sequence[tuple] = (),
    temperature=1.0,
    chunk: int = 1024,
) -> dict:
    """Statistics of the responses in a batch: `response_hidden`, then `token_statistics`.

    Args:
      config, params: the model.
      tokens, positions: [B, P+T] int32.
      prompt_length: P.
      functions: as in `token_statistics`.
      others: (config, params) of each further model, which reads the same tokens.
      temperature: divides the logits of every model.
      chunk: tokens per slice of the vocabulary head.

    Returns:
      name -> [B, T] float32 or a pytree of [B, T, ...].
    """

    def states(config, params):
        return response_hidden(config, params, tokens, positions, prompt_length)[0]

    return token_statistics(
        config,
        params,
        states(config, params),
        tokens[:, prompt_length:],
        functions,
        others=[(c, p, states(c, p)) for c, p in others],
        temperature=temperature,
        chunk=chunk,
    )
