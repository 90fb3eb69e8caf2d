"""Rollouts: prompts in, graded responses out."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np


@dataclasses.dataclass
class Rollout:
    """Responses to a batch of prompts; rows of a prompt are contiguous. All arrays are numpy.

    Attributes:
      prompts, prompt_positions: [B,P] int32, left-padded; position -1 is padding.
      tokens: [B,T] int32 sampled tokens, right-padded.
      mask: [B,T] float32, 1 on sampled tokens, the stop token included.
      logprobs: [B,T] float32 log-probabilities of the sampler.
      truncated: [B] bool, no stop token within T.
      group_ids: [B] int32 index of the prompt in the run.
      records: the task record of each row.
      texts: the decoded response of each row.
      rewards: [B] float32 weighted total.
      components: name -> [B] float32 of each reward.
      correct: [B] float32 verdict of the task's own verifier.
      errors: reward calls that failed and were counted as 0.
    """

    prompts: np.ndarray
    prompt_positions: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    truncated: np.ndarray
    group_ids: np.ndarray
    records: list
    texts: list[str]
    rewards: np.ndarray | None = None
    components: dict[str, np.ndarray] | None = None
    correct: np.ndarray | None = None
    errors: int = 0

    def __len__(self):
        return len(self.tokens)

    def model_rows(self) -> dict[str, np.ndarray]:
        """What the model reads: whole sequences, their positions."""
        following = self.prompt_positions[:, -1:] + 1 + np.arange(self.tokens.shape[1])
        positions = np.where(self.mask > 0, following, -1).astype(np.int32)
        return {
            "tokens": np.concatenate([self.prompts, self.tokens], axis=1).astype(np.int32),
            "positions": np.concatenate([self.prompt_positions, positions], axis=1),
        }

    def take(self, rows: np.ndarray) -> "Rollout":
        """Returns the rollout of some rows."""
        picked = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value = value[rows]
            elif isinstance(value, list):
                value = [value[i] for i in rows]
            elif isinstance(value, dict):
                value = {k: v[rows] for k, v in value.items()}
            picked[field.name] = value
        return Rollout(**picked)


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Concatenates rollouts row by row."""
    out = {}
    for field in dataclasses.fields(Rollout):
        values = [getattr(p, field.name) for p in parts]
        if isinstance(values[0], np.ndarray):
            out[field.name] = np.concatenate(values)
        elif isinstance(values[0], list):
            out[field.name] = [x for v in values for x in v]
        elif isinstance(values[0], dict):
            out[field.name] = {k: np.concatenate([v[k] for v in values]) for k in values[0]}
        else:
            out[field.name] = sum(values) if values[0] is not None else None
    return Rollout(**out)


def encode_prompts(texts: Sequence[str], encode: Callable, width: int, pad_id: int):
    """Left-pads prompts to a fixed width.

    Returns:
      tokens [N,width] int32 and positions [N,width] int32 (-1 on padding).

    Raises:
      ValueError: an empty prompt, or one longer than the width; the message shows it.
    """
    tokens = np.full((len(texts), width), pad_id, np.int32)
    positions = np.full((len(texts), width), -1, np.int32)
    for row, text in enumerate(texts):
        ids = encode(text)
        if not 0 < len(ids) <= width:
            shown = text if len(text) <= 200 else text[:200] + "..."
            raise ValueError(
                f"A prompt of {len(ids)} tokens does not fit config.sampling.max_prompt_tokens="
                f"{width}: {shown!r}. Raise the limit (and mind the model's context length), or "
                "leave the prompt out."
            )
        tokens[row, width - len(ids) :] = ids
        positions[row, width - len(ids) :] = np.arange(len(ids))
    return tokens, positions


def response_keys(seed: int, step: int, prompt_ids: Sequence[int], group_size: int) -> np.ndarray:
    """Raw random keys [N * G, ...], each folded from (seed, step, prompt, sample).

    A response's randomness depends on nothing else: not on batch layout nor device count.
    """
    prompts = np.repeat(np.asarray(prompt_ids, np.uint32), group_size)
    samples = np.tile(np.arange(group_size, dtype=np.uint32), len(prompt_ids))
    return np.asarray(_fold(jax.random.key(seed), np.uint32(step), prompts, samples))


@jax.jit
def _fold(base, step, prompts, samples):
    base = jax.random.fold_in(base, step)

    def one(prompt, sample):
        return jax.random.fold_in(jax.random.fold_in(base, prompt), sample)

    return jax.random.key_data(jax.vmap(one)(prompts, samples))
