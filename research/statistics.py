"""From model to per-token statistics: what the update differentiates and what signals score.

A statistic is made from the response's hidden states, in chunks of the vocabulary head, so that
no [B,T,V] array exists. An objective over whole distributions is split by its paper into a token
function, which rides the same chunks, and a reduction.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

import losses
from losses.catalogue import bound
from models import heads, scoring
from models.config import ModelConfig

STATISTICS = ("logprobs", "entropy", "values", "logits", "hidden", "mtp_logprobs")
"""What can be computed of a response under a model; "logits" and "hidden" are dense."""

HEAD_FUNCTIONS = {"logprobs": scoring.log_prob, "entropy": scoring.entropy}
"""Statistics that are functions of (logits, *others' logits, token) at a position."""


def statistics(
    config: ModelConfig,
    params,
    rows: Mapping[str, jax.Array],
    names: Sequence[str],
    *,
    prompt_length: int,
    temperature: float,
    chunk: int,
    group_size: int = 1,
    extra: Mapping[str, Callable] | None = None,
    others: Mapping[str, tuple] | None = None,
) -> dict[str, jax.Array]:
    """Returns the named statistics of the responses, each [B,T] (dense ones [B,T,V or D]).

    Args:
      config, params: the model.
      rows: "tokens" and "positions" [B,P+T].
      names: of `STATISTICS`.
      prompt_length: P.
      temperature: of the policy; log-probabilities, entropies and logits are of the tempered
        distribution.
      chunk: tokens per slice of the vocabulary head.
      group_size: consecutive rows that have the same prompt; it is read once for all of them.
      extra: further functions (logits, *others' logits, token) -> [chunk] or dict of them.
      others: name -> (config, params, hidden [B,T,D]) of the models that `extra` compares with.
    """
    capture = ("mtp:1",) if "mtp_logprobs" in names else ()
    hidden, captured = scoring.response_hidden(
        config,
        params,
        rows["tokens"],
        rows["positions"],
        prompt_length,
        group_size,
        capture=capture,
    )
    targets = rows["tokens"][:, prompt_length:]
    functions = {n: HEAD_FUNCTIONS[n] for n in names if n in HEAD_FUNCTIONS}
    out = {}
    if functions or extra:
        out = scoring.token_statistics(
            config,
            params,
            hidden,
            targets,
            functions | dict(extra or {}),
            others=tuple((others or {}).values()),
            temperature=temperature,
            chunk=chunk,
        )
    if "mtp_logprobs" in names:
        # The state two columns before a token predicts it; in front of the prompt there is none.
        ahead = jnp.pad(captured["mtp:1"], ((0, 0), (1, 0), (0, 0)))
        out["mtp_logprobs"] = scoring.token_statistics(
            config,
            params,
            ahead[:, prompt_length - 1 : -2],
            targets,
            {"mtp": scoring.log_prob},
            temperature=temperature,
            chunk=chunk,
        )["mtp"]
    if "values" in names:
        out["values"] = heads.values(params, config, hidden)
    if "logits" in names:
        out["logits"] = heads.logits(params, config, hidden) / temperature
    if "hidden" in names:
        out["hidden"] = hidden
    return out


LOGITS_OF = {
    "teacher_logits": "teacher",
    "ref_logits": "reference",
    "old_logits": "policy",
    "reverse_logits": "reverse",
}
"""Whole distributions that ride the chunks of the vocabulary head -> the model they are of."""


def streamed(composed: losses.Composed):
    """Splits off what of a composition runs in the chunks of the vocabulary head.

    Returns:
      (token, sources, loss): `token` is a function of (logits, *others' logits, token) to a dict
      of statistics, or None; `sources` names, in order, the models whose logits it reads; `loss`
      maps arrays (statistics among them) to (loss, metrics).
    """
    stage = composed.objective
    if stage.paper.split is None:
        return None, (), composed.loss
    function, reduction = stage.paper.split
    accepted = inspect.signature(function).parameters
    hyper = {k: v for k, v in stage.settings.items() if k in accepted}
    names = [n for n in accepted if n in LOGITS_OF]

    def token(logits, *rest):
        given = dict(zip(names, rest))
        if "tokens" in accepted:
            given["tokens"] = rest[-1]
        return function(logits=logits, **given, **hyper)

    takes = inspect.signature(reduction).parameters

    def loss(arrays):
        settings = bound({k: v for k, v in stage.settings.items() if k in takes}, arrays)
        given = {k: v for k, v in arrays.items() if k in takes}
        total, metrics = reduction(**given, **settings)
        for regularizer in composed.regularizers:
            more, logged = regularizer(arrays)
            total, metrics = total + more, {**metrics, **logged}
        return total, metrics

    return token, tuple(LOGITS_OF[n] for n in names), loss
