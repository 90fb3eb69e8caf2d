"""The decoder-only transformer of every supported family, read from top to bottom."""

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from models.attention import Attention, rope_table, visibility
from models.cache import Cache
from models.config import ModelConfig, override
from models.heads import init_heads
from models.layers import INIT_SCALE, MLP, Linear, RMSNorm
from models.moe import SparseMLP


@flax.struct.dataclass
class Output:
    """What a forward pass returns.

    Args:
      hidden: [B, S, D] after the final norm, in the compute dtype.
      cache: the updated cache, or None.
      captured: what `capture` asked for, by the names it was asked by.
    """

    hidden: jax.Array
    cache: Cache | None
    captured: dict[str, jax.Array]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms on the branches' ends in Gemma 2, 3."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, table, seen, memory=None, layer=0, index=0, routes=None, measure=None):
        """Returns the new x [B, S, D], memory, what was measured of the attention, and routes."""
        config = self.config
        branch, memory, measured = Attention(config, name="attention")(
            RMSNorm(config, name="attention_norm")(x), table, seen, memory, layer, index, measure
        )
        if config.post_norms:
            branch = RMSNorm(config, name="attention_post_norm")(branch)
        x = x + branch
        branch = RMSNorm(config, name="mlp_norm")(x)
        if config.num_experts:
            branch, routes = SparseMLP(config, name="moe")(branch, routes)
        else:
            branch = MLP(config, name="mlp")(branch)
        if config.post_norms:
            branch = RMSNorm(config, name="mlp_post_norm")(branch)
        return x + branch, memory, measured, routes


class Layer(nn.Module):
    """One step of the loop over layers: picks this layer's tables, runs its block, captures."""

    config: ModelConfig
    measure: str | None
    record_routes: bool

    @nn.compact
    def __call__(self, carry, per_layer, tables, seen, index):
        x, memory, hidden, attention = carry
        layer, kind, slot, share, routes = per_layer
        x, memory, measured, routes = Block(self.config, name="block")(
            x, tables[kind], seen[kind], memory, layer, index, routes, self.measure
        )
        if hidden is not None:
            # Layers that nobody asked for have a slot past the end, where a write is dropped.
            hidden = hidden.at[slot].set(x, mode="drop")
        if attention is not None:
            # Summed here: the maps of all layers are never held together.
            attention, measured = attention + share * measured, None
        carry = (x, memory, hidden, attention)
        return carry, (measured, routes if self.record_routes else None)


class Transformer(nn.Module):
    """Token ids to final hidden states; the vocabulary head is `models.heads.logits`."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, tokens, positions, *, cache=None, segment_ids=None, routes=None, capture=()
    ) -> Output:
        """Runs the network over a batch, or over the next columns of a cache.

        A key is visible where key_pos >= 0, key_pos <= query_pos, inside the layer's window, and in
        the query's segment. A padded query's output is finite and otherwise arbitrary.

        Args:
          tokens: [B, S] int32.
          positions: [B, S] int32; 0, 1, ... on real tokens and -1 on padding.
          cache: keys and values of the columns before these, or None. Its length must leave room.
          segment_ids: [B, S] int32 of packed sequences, or None; not with a cache. Every segment of
            a row sees what has an id below 0.
          routes: [L, B, S, k] int32 experts to replay, or None; entries below 0 are chosen anew.
          capture: names of what else to return: "hidden:<layer>" [B, S, D] (output of the layer,
            from 0), "attention_entropy:<layer>" [B, S] nats, mean over heads,
            "attention:<first>-<last>" [B, S, S], weights averaged over heads and these layers (not
            with entropies, which are another pass), "routes" [L, B, S, k], and "mtp:<depth>"
            [B, S, D] (from 1; row s predicts token s + 1 + depth).

        Returns:
          An Output.

        Raises:
          ValueError: a name in `capture` that the model does not have, attention weights of two
            ranges or beside entropies, segments, mtp or attention captures with a cache, or routes
            of a dense model.
        """
        config = self.config
        wanted = _parse_capture(config, capture)
        whole = segment_ids is not None or wanted["mtp"] or wanted["attention"]
        if cache is not None and whole:
            raise ValueError(
                "segment_ids, mtp and attention captures need the whole batch, not a cache"
            )
        if len(wanted["attention"]) + bool(wanted["attention_entropy"]) > 1:
            raise ValueError(f"one forward pass measures attention in one way, not {capture}")
        if routes is not None and not config.num_experts:
            raise ValueError("routes were given to a model without experts (num_experts=0)")

        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=nn.initializers.normal(INIT_SCALE),
            name="embed",
        )

        def embedded(ids):
            # The scale is rounded to the compute dtype first, as the Gemma models were trained.
            return embed(ids) * jnp.asarray(config.embed_scale, config.dtype)

        index, key_positions, memory = 0, positions, None
        if cache is not None:
            index, memory = cache.index, (cache.keys, cache.values)
            key_positions = jax.lax.dynamic_update_slice(cache.positions, positions, (0, index))
        length = key_positions.shape[1]

        def of_kinds(make):
            """Tables for whole-context layers and for windowed layers, if there are any."""
            kinds = 1 + max(config.layer_kinds)
            return jnp.stack([make(bool(kind)) for kind in range(kinds)])

        tables = of_kinds(lambda local: rope_table(config, positions, length, local))
        seen = of_kinds(
            lambda local: visibility(
                positions, key_positions, config.sliding_window if local else None, segment_ids
            )
        )

        kept = sorted(wanted["hidden"])
        slots = [kept.index(i) if i in kept else len(kept) for i in range(config.num_layers)]
        x = embedded(tokens)
        hidden = jnp.zeros((len(kept), *x.shape), x.dtype) if kept else None
        measure, attention = ("entropy" if wanted["attention_entropy"] else None), None
        share = jnp.zeros(config.num_layers)
        for first, last in wanted["attention"]:
            measure, share = "weights", share.at[first : last + 1].set(1 / (last + 1 - first))
            attention = jnp.zeros((*tokens.shape, tokens.shape[1]))
        per_layer = (
            jnp.arange(config.num_layers),
            jnp.asarray(config.layer_kinds),
            jnp.asarray(slots),
            share,
            routes,
        )
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False) if config.remat else Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=config.num_layers,
            unroll=config.scan_unroll,
        )(config, measure, bool(wanted["routes"]), name="layers")
        (x, memory, hidden, attention), (spread, used) = layers(
            (x, memory, hidden, attention), per_layer, tables, seen, index
        )
        x = RMSNorm(config, name="norm")(x)

        captured = {f"hidden:{i}": hidden[slot] for slot, i in enumerate(kept)}
        captured |= {f"attention_entropy:{i}": spread[i] for i in wanted["attention_entropy"]}
        captured |= {f"attention:{a}-{b}": attention for a, b in wanted["attention"]}
        if wanted["routes"]:
            captured["routes"] = used
        state, state_positions = x, positions
        for depth in range(1, max(wanted["mtp"], default=0) + 1):
            state, state_positions = MultiToken(config, name=f"mtp_{depth}")(
                state, state_positions, embedded, tokens, depth, segment_ids
            )
            if depth in wanted["mtp"]:
                captured[f"mtp:{depth}"] = state
        if cache is not None:
            cache = Cache(*memory, key_positions, index + tokens.shape[1])
        return Output(x, cache, captured)


class MultiToken(nn.Module):
    """Multi-token prediction: h' = norm(block([norm(h_s) ; norm(embed(token_{s+d}))] W)).

    Depth d takes the state of depth d - 1 (the trunk's for d = 1) and predicts token s + 1 + d
    through the shared vocabulary head (DeepSeek-V3, arXiv:2412.19437, section 2.2).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, state, positions, embedded, tokens, depth, segment_ids=None):
        """Returns the new state [B, S, D] and its positions, -1 where token s + d is missing."""
        # These blocks train whole; adapters are the trunk's.
        config = override(self.config, lora_rank=0)
        ahead = jnp.roll(tokens, -depth, axis=1)
        ahead_positions = jnp.roll(positions, -1, axis=1).at[:, -1].set(-1)
        positions = jnp.where(ahead_positions > positions, positions, -1)
        following = embedded(ahead)
        if config.mtp_detach:
            state, following = jax.lax.stop_gradient((state, following))
        joined = [
            RMSNorm(config, name="state_norm")(state),
            RMSNorm(config, name="embed_norm")(following),
        ]
        x = Linear(config, config.hidden_size, name="join")(jnp.concatenate(joined, axis=-1))
        table = rope_table(config, positions, positions.shape[1])
        seen = visibility(positions, positions, None, segment_ids)
        x = Block(config, name="block")(x, table, seen)[0]
        return RMSNorm(config, name="norm")(x), positions


def _parse_capture(config: ModelConfig, capture) -> dict[str, set]:
    """Sorts capture names by kind; the error names the bad one and what the model has."""
    wanted = {k: set() for k in ("hidden", "attention_entropy", "attention", "routes", "mtp")}
    last = config.num_layers - 1
    ranges = {
        "hidden": range(config.num_layers),
        "attention_entropy": range(config.num_layers),
        "mtp": range(1, config.mtp_heads + 1),
    }
    for name in capture:
        kind, _, number = name.partition(":")
        if name == "routes" and config.num_experts:
            wanted["routes"].add(0)
        elif kind in ranges and number.isdigit() and int(number) in ranges[kind]:
            wanted[kind].add(int(number))
        elif kind == "attention" and _layer_range(number, last):
            wanted[kind].add(_layer_range(number, last))
        else:
            known = f"hidden:0..{last}, attention_entropy:0..{last}, attention:0-{last}"
            known += f", mtp:1..{config.mtp_heads}" if config.mtp_heads else ""
            known += ", routes" if config.num_experts else ""
            raise ValueError(f"cannot capture {name!r}; this model has {known}")
    return wanted


def _layer_range(text: str, last: int) -> tuple[int, int] | None:
    """The layers of "<first>-<last>", or None if the model has no such range."""
    first, _, end = text.partition("-")
    if not (first.isdigit() and end.isdigit() and int(first) <= int(end) <= last):
        return None
    return int(first), int(end)


@functools.partial(jax.jit, static_argnums=0)
def init(config: ModelConfig, key) -> dict:
    """Returns fresh parameters: a nested dict, with every layer's leaf stacked on axis 0.

    Args:
      config: the model.
      key: a jax.random key.
    """
    trunk_key, heads_key = jax.random.split(key)
    token = jnp.zeros((1, 1), jnp.int32)
    every_head = tuple(f"mtp:{depth}" for depth in range(1, config.mtp_heads + 1))
    variables = Transformer(config).init(trunk_key, token, token, capture=every_head)
    return {**variables["params"], **init_heads(config, heads_key)}
