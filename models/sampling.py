"""The sampling loop: one compiled function from prompts to groups of responses."""

import functools
import math

import flax.struct
import jax
import jax.numpy as jnp

from models import heads
from models.cache import Cache, init_cache, repeat_cache
from models.config import ModelConfig
from models.transformer import Transformer


@flax.struct.dataclass
class Samples:
    """Sampled responses, right-padded; B = N G, a prompt's rows contiguous.

    Args:
      tokens: [B, T] int32; pad_id after the stop token.
      mask: [B, T] float32; 1 on sampled tokens, the stop token included.
      logprobs: [B, T] float32, nats, of the distribution that was sampled from; 0 where mask is 0.
      truncated: [B] bool; no stop token within T.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    truncated: jax.Array


@flax.struct.dataclass
class _State:
    """Carry of the decoding loop: step t, each row's last token, and what was sampled so far."""

    step: jax.Array
    token: jax.Array
    done: jax.Array
    samples: Samples
    cache: Cache


def filter_logits(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Logits of the distribution that is sampled from: tempered, then truncated.

    Each truncation acts on what the one before left, renormalised; excluded tokens get -inf:
      top_k keeps the k likeliest; top_p the smallest set of likeliest tokens whose probabilities
      sum to at least top_p; min_p those with p >= min_p max p.
    Tokens that tie with the last one kept are kept too. The likeliest token always is.

    Args:
      logits: [..., V] float32.
      temperature: divides the logits; above 0.
      top_k: 0 is off.
      top_p: in (0, 1]; 1 is off.
      min_p: in [0, 1]; 0 is off.

    Returns:
      [..., V] float32.
    """
    logits = logits / temperature

    def keep_from(lowest):
        return jnp.where(logits >= lowest, logits, -jnp.inf)

    if top_k or top_p < 1:
        # The k likeliest are enough to find the nucleus among; only without top_k is V sorted.
        highest = jax.lax.top_k(logits, top_k or logits.shape[-1])[0]
    if top_k:
        logits = keep_from(highest[..., -1:])
    if top_p < 1:
        p = jnp.exp(highest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        before = jnp.cumsum(p, axis=-1) - p
        inside = (before < top_p).at[..., 0].set(True)
        logits = keep_from(jnp.min(highest, axis=-1, keepdims=True, where=inside, initial=jnp.inf))
    if min_p:
        logits = keep_from(jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p))
    return logits


@functools.partial(
    jax.jit,
    static_argnames=(
        "config",
        "group_size",
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "stop_tokens",
        "pad_id",
    ),
)
def sample(
    config: ModelConfig,
    params,
    prompts,
    prompt_positions,
    keys,
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop_tokens: tuple[int, ...] = (),
    pad_id: int = 0,
    allowed=None,
) -> Samples:
    """Samples `group_size` responses to each prompt.

    Token t of row b is argmax_v(log p(v) + g(v)), g Gumbel noise from fold_in(keys[b], t): an exact
    draw from p, whatever other rows are in the batch. A prompt is read once for its whole group.
    Decoding stops as soon as every row has. Recompiles for new shapes and new keyword arguments
    only.

    Args:
      config, params: the model.
      prompts: [N, P] int32, left-padded, each of at least one token.
      prompt_positions: [N, P] int32: 0, 1, ... on tokens and -1 on padding.
      keys: [N G] jax.random keys, one per response, a prompt's contiguous.
      group_size: G.
      max_new_tokens: T.
      temperature: of the policy; 0 takes the likeliest token, and reports its log-probability at
        temperature 1.
      top_k, top_p, min_p: truncation, as in `filter_logits`; not used at temperature 0.
      stop_tokens: ids that end a response, themselves part of it.
      pad_id: the token after the end.
      allowed: [T, V] bool, the tokens that may be drawn at each step of a response; None: all. The
        distribution is that of the allowed tokens alone, before any truncation.

    Returns:
      Samples.

    Raises:
      ValueError: a setting out of its range, or arrays whose shapes do not match.
    """
    _check(config, prompts, prompt_positions, keys, group_size, max_new_tokens, temperature)
    _check_truncation(config, top_k, top_p, min_p, stop_tokens)
    model = Transformer(config)
    rows = len(prompts) * group_size
    stops = jnp.asarray(stop_tokens, jnp.int32)

    # The cache has the length of the whole batch from the start: rotary frequencies that depend on
    # the length are then those of the scorer.
    cache = init_cache(config, len(prompts), prompts.shape[1] + max_new_tokens)
    prefill = model.apply({"params": params}, prompts, prompt_positions, cache=cache)
    first_position = jnp.repeat(prompt_positions[:, -1] + 1, group_size)

    def draw(hidden, step):
        """One token per row and its log-probability, from the hidden states [B, D]."""
        logits = heads.logits(params, config, hidden)
        if allowed is not None:
            logits = jnp.where(allowed[step], logits, -jnp.inf)
        if temperature == 0:
            log_p = jax.nn.log_softmax(logits)
            token = jnp.argmax(log_p, axis=-1)
        else:
            log_p = jax.nn.log_softmax(filter_logits(logits, temperature, top_k, top_p, min_p))
            noise = jax.vmap(
                lambda key: jax.random.gumbel(jax.random.fold_in(key, step), log_p.shape[1:])
            )(keys)
            token = jnp.argmax(log_p + noise, axis=-1)
        return token.astype(jnp.int32), jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]

    def record(state, hidden, cache):
        """The state after drawing token `state.step` of the rows that are not done."""
        token, logprob = draw(hidden, state.step)
        live, samples = ~state.done, state.samples
        token = jnp.where(live, token, pad_id)
        done = state.done | jnp.isin(token, stops)
        return _State(
            step=state.step + 1,
            token=token,
            done=done,
            samples=Samples(
                tokens=samples.tokens.at[:, state.step].set(token),
                mask=samples.mask.at[:, state.step].set(live.astype(jnp.float32)),
                logprobs=samples.logprobs.at[:, state.step].set(jnp.where(live, logprob, 0.0)),
                truncated=~done,
            ),
            cache=cache,
        )

    def advance(state):
        """Reads the last token of each row, and draws the next."""
        # Position -1 hides the padding of finished rows.
        position = jnp.where(state.done, -1, first_position + state.step - 1)
        out = model.apply(
            {"params": params}, state.token[:, None], position[:, None], cache=state.cache
        )
        return record(state, out.hidden[:, 0], out.cache)

    shape = (rows, max_new_tokens)
    start = _State(
        step=jnp.zeros((), jnp.int32),
        token=jnp.full(rows, pad_id, jnp.int32),
        done=jnp.zeros(rows, bool),
        samples=Samples(
            tokens=jnp.full(shape, pad_id, jnp.int32),
            mask=jnp.zeros(shape, jnp.float32),
            logprobs=jnp.zeros(shape, jnp.float32),
            truncated=jnp.ones(rows, bool),
        ),
        cache=None,
    )
    state = record(
        start,
        jnp.repeat(prefill.hidden[:, -1], group_size, axis=0),
        repeat_cache(prefill.cache, group_size),
    )
    return jax.lax.while_loop(
        lambda state: (state.step < max_new_tokens) & ~jnp.all(state.done), advance, state
    ).samples


def _check(config, prompts, positions, keys, group_size, max_new_tokens, temperature):
    if prompts.ndim != 2 or prompts.shape != positions.shape:
        raise ValueError(
            f"prompts and prompt_positions: expected both [N, P], got {prompts.shape} and "
            f"{positions.shape}"
        )
    for name, value in (("group_size", group_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if keys.shape != (len(prompts) * group_size,) or not jnp.issubdtype(
        keys.dtype, jax.dtypes.prng_key
    ):
        raise ValueError(
            f"keys: expected {len(prompts) * group_size} typed keys (jax.random.key), one for each "
            f"of {group_size} responses to {len(prompts)} prompts, got {keys.dtype} {keys.shape}"
        )
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")


def _check_truncation(config, top_k, top_p, min_p, stop_tokens):
    if not 0 <= top_k <= config.vocab_size:
        raise ValueError(f"top_k must lie in 0..{config.vocab_size} (0 is off), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1] (1 is off), got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must lie in [0, 1] (0 is off), got {min_p}")
    outside = [token for token in stop_tokens if not 0 <= token < config.vocab_size]
    if outside:
        raise ValueError(
            f"stop_tokens {outside} are not in the vocabulary of {config.vocab_size} tokens"
        )
