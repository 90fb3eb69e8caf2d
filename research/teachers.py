"""Teachers: the models that a run learns from beside its rewards.

`config.teacher` is WEIGHTS or WEIGHTS:PROMPT. WEIGHTS are

    DIR            a model directory, with the run's tokenizer
    sft:STEPS      the run's model, trained on demonstrations from its initialisation
    domains:STEPS  one such model for each domain of the task, on its own demonstrations
    dpo:STEPS      the warmed-up model, trained on pairs of a demonstration and a damaged copy
    ema            the running average of the policy
    self           the policy as it is at the start of the step
    start          the policy as it was after the warm-up
    merge          a TIES merge of the policies of the last four steps

and PROMPT (research.signals.contexts) shows the teacher what the policy does not see.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from losses.catalogue import nearest
from losses.distillation.gtr_turbo import ties_merge
from research.config import ConfigError
from research.signals import contexts

TRAINED = ("sft", "domains", "dpo")
KINDS = (*TRAINED, "ema", "self", "start", "merge")
MERGED = (0.125, 0.125, 0.25, 0.5)
"""Weights of the merged policies, the latest last."""


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A parsed `config.teacher`.

    Attributes:
      weights: one of `KINDS`, or a model directory.
      steps: updates of the trained kinds.
      prompt: name of the prompt that it reads, "" for the policy's own.
    """

    weights: str
    steps: int = 0
    prompt: str = ""


def parse(text: str) -> Teacher:
    """Reads `config.teacher`.

    Raises:
      ConfigError: trained weights without a number of steps, or an unknown prompt; names the
        nearest one.
    """
    weights, *rest = text.split(":")
    if weights not in KINDS:
        return Teacher(text)
    steps = 0
    if weights in TRAINED:
        number = rest.pop(0) if rest else ""
        if not re.fullmatch(r"[1-9]\d*", number):
            raise ConfigError(
                f"teacher={text!r}: expected {weights}:STEPS with at least one step, e.g. "
                f"{weights}:400."
            )
        steps = int(number)
    prompt = ":".join(rest)
    if prompt and prompt not in contexts.CONTEXTS:
        known = list(contexts.CONTEXTS)
        raise ConfigError(
            f"teacher={text!r}: unknown prompt {prompt!r}.{nearest(prompt, known)} "
            f"Known: {', '.join(known)}."
        )
    return Teacher(weights, steps, prompt)


def merged(base, checkpoints: Sequence) -> Any:
    """Returns the TIES merge of checkpoints of one base, the latest ones weighing most.

    Args:
      base: the parameters that all of them started from; a tree of arrays.
      checkpoints: trees of the same structure, oldest first; the last `len(MERGED)` count.
    """
    latest = checkpoints[-len(MERGED) :]
    deltas = [jax.tree.map(jnp.subtract, params, base) for params in latest]
    return jax.tree.map(jnp.add, base, ties_merge(deltas, MERGED[-len(deltas) :]))


def check_tokenizer(directory: str, teacher, tokenizer, sample: str) -> None:
    """Raises an error if a teacher's tokens do not mean what the run's do.

    Raises:
      ConfigError: the two differ in their vocabularies or on the sample.
    """
    same = teacher.vocab_size == tokenizer.vocab_size
    if not same or teacher.encode(sample) != tokenizer.encode(sample):
        raise ConfigError(
            f"teacher={directory!r} has another tokenizer ({teacher.vocab_size} tokens) than the "
            f"run ({tokenizer.vocab_size} tokens): its probabilities belong to other tokens. Use a "
            "teacher of the same family, or a paper that compares texts (omniopd)."
        )
