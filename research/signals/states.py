"""Signals made from hidden states and attention, reduced on the device in one pass."""

import jax.numpy as jnp
import numpy as np

from losses.credit import verl_rank
from models import scoring
from research.signals import Context, signal
from research.signals.spans import starts
from research.signals.steps import answer_mask

STRIDE = 40
"""VERL: tokens between two ranks; an eighth of the response where that is shorter."""
SMOOTHING = 0.3
"""VERL: weight of the newest batch in its baselines."""
OUT_OF_REACH = 1e9
"""VERL: a baseline that no response is above, for the first step, which has none."""


def captured(config, params, rows, names):
    """What a forward pass over the rows captures, [b,P+T,...] each."""
    length = rows["mask"].shape[1]
    return scoring.response_hidden(
        config,
        params,
        rows["tokens"],
        rows["positions"],
        rows["tokens"].shape[1] - length,
        capture=names,
    )[1]


# -- attention -------------------------------------------------------------------------------------


def mean_attention_entropy(config, params, rows):
    """Entropy of each token's attention row, mean over heads and layers: {"entropy": [b,T]}."""
    names = tuple(f"attention_entropy:{i}" for i in range(config.num_layers))
    found = captured(config, params, rows, names)
    mean = sum(found[name] for name in names) / len(names)
    return {"entropy": mean[:, -rows["mask"].shape[1] :]}


@signal("attention_entropy")
def attention_entropy(context: Context) -> np.ndarray:
    """How diffuse the attention of each token is, nats, [B,T] (attention-entropy-anchors)."""
    return context.measure(mean_attention_entropy)["entropy"] * context.rollout.mask


@signal("context_lengths")
def context_lengths(context: Context) -> np.ndarray:
    """Positions that each token can attend to, its own included, [B,T]."""
    positions = context.rollout.model_rows()["positions"]
    return (positions[:, -context.rollout.mask.shape[1] :] + 1).astype(np.float32)


def middle_attention(config, params, rows):
    """Attention averaged over heads and the middle third of the layers: {"map": [b,P+T,P+T]}."""
    first = config.num_layers // 3
    last = max(-(-2 * config.num_layers // 3) - 1, first)
    name = f"attention:{first}-{last}"
    return {"map": captured(config, params, rows, (name,))[name]}


@signal("attention")
def attention(context: Context) -> np.ndarray:
    """The map of the middle layers, prompt included, [B,P+T,P+T] (flowtracer)."""
    return context.measure(middle_attention)["map"]


@signal("question_mask")
def question_mask(context: Context) -> np.ndarray:
    """Tokens of the problem, without what a chat template puts around it, [B,P+T] (flowtracer)."""
    found = prompt_mask(context, lambda record: record.prompt)
    return np.pad(found, ((0, 0), (0, context.rollout.mask.shape[1])))


@signal("answer_mask", given="flowtracer_advantage")
def answer_columns(context: Context) -> np.ndarray:
    """Tokens of the answer, in columns that begin with the prompt, [B,P+T] (flowtracer)."""
    return np.pad(answer_mask(context), ((0, 0), (context.rollout.prompts.shape[1], 0)))


def prompt_mask(context: Context, part) -> np.ndarray:
    """Tokens of the prompts that hold a part of them, [B,P].

    Args:
      context: of the step.
      part: record -> the text of the part.
    """
    rollout, tokenizer = context.rollout, context.tokenizer
    out, known = np.zeros(rollout.prompts.shape, np.float32), {}
    for row, record in enumerate(rollout.records):
        key = rollout.group_ids[row]
        if key not in known:
            there = rollout.prompt_positions[row] >= 0
            ids = rollout.prompts[row][there]
            text, wanted = tokenizer.decode(ids), part(record)
            begins = np.array([*starts(tokenizer, ids), len(text)])
            first = text.find(wanted)
            found = (begins[1:] > first) & (begins[:-1] < first + len(wanted)) & (first >= 0)
            known[key] = np.zeros(len(there), np.float32)
            known[key][there] = found
        out[row] = known[key]
    return out


# -- hidden states ---------------------------------------------------------------------------------


def resemblance(config, params, rows):
    """Mean cosine of each token's states with those of a span: {"cosine": [b,T]}.

    The mean runs over the span's tokens and over all layers, the embeddings included.
    """
    names = tuple(f"hidden:{i}" for i in range(config.num_layers))
    found = captured(config, params, rows, names)
    layers = [params["embed"]["embedding"][rows["tokens"]], *(found[name] for name in names)]
    span = rows["span"][..., None] / jnp.maximum(rows["span"].sum(1), 1)[:, None, None]
    total = 0.0
    for states in layers:
        states = states.astype(jnp.float32)
        norm = jnp.linalg.norm(states, axis=-1, keepdims=True)
        unit = states / jnp.maximum(norm, 1e-12)
        total += jnp.einsum("btd,bd->bt", unit, (unit * span).sum(1))
    return {"cosine": total[:, -rows["mask"].shape[1] :] / len(layers)}


@signal("context_scores")
def context_scores(context: Context) -> np.ndarray:
    """Resemblance of each token to the evidence of the prompt, or to all of it, [B,T] (pepo)."""

    def part(record):
        pieces = record.info.get("evidence")
        return context.task.separator.join(pieces) if pieces else record.prompt

    width = context.rollout.mask.shape[1]
    span = np.pad(prompt_mask(context, part), ((0, 0), (0, width)))
    return context.measure(resemblance, span=span)["cosine"] * context.rollout.mask


def mean_state(config, params, rows):
    """Mean of the last layer's states over the response: {"mean": [b,D]}."""
    name = f"hidden:{config.num_layers - 1}"
    mask = rows["mask"][..., None]
    states = captured(config, params, rows, (name,))[name][:, -mask.shape[1] :]
    return {"mean": (states * mask).sum(1) / jnp.maximum(mask.sum(1), 1)}


@signal("similarity", models=("reference",))
def similarity(context: Context) -> np.ndarray:
    """Cosine of the responses' mean states under the reference, at least 0, [B,B] (setpo)."""
    mean = context.measure(mean_state, source="reference")["mean"].astype(np.float32)
    unit = mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)
    kernel = np.maximum(unit @ unit.T, 0.0)
    np.fill_diagonal(kernel, 1.0)
    return np.minimum(kernel, 1.0)


def ranks(config, params, rows):
    """Effective rank of the last layer's states, its growth and acceleration: {"ranks": [b,3]}."""
    name = f"hidden:{config.num_layers - 1}"
    length = rows["mask"].shape[1]
    states = captured(config, params, rows, (name,))[name][:, -length:].astype(jnp.float32)
    stride = min(STRIDE, max(length // 8, 1))
    return {"ranks": verl_rank.rank_metrics(states, rows["mask"], stride=stride)}


def _ranks(context):
    return context.measure(ranks)["ranks"]


@signal("rank_metrics")
def rank_metrics(context: Context) -> np.ndarray:
    """Acceleration, growth and size of the effective rank of each response, [B,3] (verl-rank)."""
    return context.once(_ranks)


@signal("baselines")
def baselines(context: Context) -> np.ndarray:
    """Running means of the rank metrics over the steps before, [3]; takes this one's in."""
    past = context.carried.get("rank_baselines")
    now = context.once(_ranks).mean(0)
    before = np.zeros(3, np.float32) if past is None else past
    context.carried["rank_baselines"] = ((1 - SMOOTHING) * before + SMOOTHING * now).astype(
        np.float32
    )
    return np.full(3, OUT_OF_REACH, np.float32) if past is None else past


@signal("mtp_mask")
def mtp_mask(context: Context) -> np.ndarray:
    """Tokens that the extra head predicts: a state two tokens before them exists, [B,T]."""
    rows, length = context.rollout.model_rows(), context.rollout.mask.shape[1]
    before = np.pad(rows["positions"], ((0, 0), (1, 0)), constant_values=-1)
    start = rows["positions"].shape[1] - length
    return context.rollout.mask * (before[:, start - 1 : -2] >= 0)
