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
      texts: the decoded response of each row; of several turns, the last.
      rewards: [B] float32 weighted total.
      components: name -> [B] float32 of each reward.
      correct: [B] float32 verdict of the task's own verifier.
      errors: reward calls that failed and were counted as 0.
      present: [B,T] float32, 1 on everything that the model reads: sampled tokens and, between
        turns, what the environment says. None: the mask.
      turn_ids: [B,T] int32 turn of each token, the environment's reply with the turn it answers.
      turn_rewards: [B,K] float32 weighted total of each turn, 0 for turns that did not take place.
      turn_texts: the decoded turns of each row.
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
    present: np.ndarray | None = None
    turn_ids: np.ndarray | None = None
    turn_rewards: np.ndarray | None = None
    turn_texts: list[list[str]] | None = None

    def __len__(self):
        return len(self.tokens)

    def model_rows(self) -> dict[str, np.ndarray]:
        """What the model reads: whole sequences, their positions."""
        following = self.prompt_positions[:, -1:] + 1 + np.arange(self.tokens.shape[1])
        present = self.mask if self.present is None else self.present
        positions = np.where(present > 0, following, -1).astype(np.int32)
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


def answered(rollout: Rollout, texts: Sequence[str], tokenizer) -> Rollout:
    """Other responses to a rollout's prompts, ungraded.

    Args:
      rollout: gives the prompts and the width.
      texts: the response of each row; what is longer than the width is cut off.
      tokenizer: of the run; its stop token ends each response.
    """
    width = rollout.tokens.shape[1]
    tokens = np.full((len(texts), width), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(texts), width), np.float32)
    for row, text in enumerate(texts):
        ids = [*tokenizer.encode(text), tokenizer.eos_id][:width]
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    return dataclasses.replace(
        rollout,
        tokens=tokens,
        mask=mask,
        present=mask,
        logprobs=np.zeros_like(mask),
        truncated=~(tokens == tokenizer.eos_id).any(axis=1),
        texts=list(texts),
        turn_ids=np.zeros_like(tokens),
        turn_texts=[[text] for text in texts],
    )


def episode(
    turns: Sequence[dict[str, np.ndarray]],
    replies: Sequence[Sequence[list[int] | None]],
    width: int,
    pad_id: int,
) -> dict[str, np.ndarray]:
    """Joins sampled turns and the environment's replies into one right-padded row each.

    Args:
      turns: "tokens", "mask" and "logprobs" [B,T] of each turn.
      replies: of each turn but the last, the reply's tokens to each row, None where its episode
        has ended; what was sampled after the end is left out.
      width: of the rows that are made.
      pad_id: the token after the end.

    Returns:
      "tokens", "mask", "present", "logprobs", "turn_ids" [B,width], of `Rollout`'s meaning.
    """
    rows = len(turns[0]["tokens"])
    out = {
        "tokens": np.full((rows, width), pad_id, np.int32),
        "mask": np.zeros((rows, width), np.float32),
        "present": np.zeros((rows, width), np.float32),
        "logprobs": np.zeros((rows, width), np.float32),
        "turn_ids": np.zeros((rows, width), np.int32),
    }
    for row in range(rows):
        end = 0
        for k, turn in enumerate(turns):
            n = int(turn["mask"][row].sum())
            here = slice(end, end + n)
            out["tokens"][row, here] = turn["tokens"][row, :n]
            out["logprobs"][row, here] = turn["logprobs"][row, :n]
            out["mask"][row, here] = 1
            reply = replies[k][row] if k < len(replies) else None
            end += n
            if reply is not None:
                out["tokens"][row, end : end + len(reply)] = reply
                end += len(reply)
            out["turn_ids"][row, here.start :] = k
            out["present"][row, :end] = 1
            if reply is None:
                break
    return out


def history(
    prompts: np.ndarray, positions: np.ndarray, rows: dict[str, np.ndarray], pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts followed by what has happened since, as prompts for the next turn.

    Args:
      prompts, positions: [B,P], left-padded.
      rows: "tokens" and "present" [B,T], from `episode`.
      pad_id: the token of the padding.

    Returns:
      tokens and positions [B,P+T] int32, left-padded: the very tokens that were sampled.
    """
    width = prompts.shape[1] + rows["tokens"].shape[1]
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    where = np.full((len(prompts), width), -1, np.int32)
    for row in range(len(prompts)):
        said = rows["tokens"][row][rows["present"][row] > 0]
        ids = np.concatenate([prompts[row][positions[row] >= 0], said])
        tokens[row, width - len(ids) :] = ids
        where[row, width - len(ids) :] = np.arange(len(ids))
    return tokens, where


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


def allowed_tokens(tokenizer, characters: str, length: int) -> np.ndarray | None:
    """Which tokens a response restricted to some characters may have, [length,V] bool.

    A token is allowed if its text is of these characters only; a stop token, anywhere but at the
    start.

    Args:
      tokenizer: of the run.
      characters: empty for no restriction, which gives None.
      length: tokens of a response.

    Raises:
      ValueError: the tokenizer has no such token.
    """
    if not characters:
        return None
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    row = np.array([bool(text) and set(text) <= set(characters) for text in texts])
    if not row.any():
        raise ValueError(f"No token of the tokenizer is made of sampling.allowed={characters!r}.")
    allowed = np.repeat(row[None], length, axis=0)
    allowed[1:, list(tokenizer.stop_ids)] = True
    return allowed


def response_keys(seed: int, step: int, prompt_ids: Sequence[int], group_size: int) -> np.ndarray:
    """Raw random keys [N * G, ...], each folded from (seed, step, prompt, sample).

    A response's randomness depends on nothing else: not on batch layout nor device count.
    """
    prompts = np.repeat(np.asarray(prompt_ids, np.uint32), group_size)
    samples = np.tile(np.arange(group_size, dtype=np.uint32), len(prompt_ids))
    return np.asarray(_fold(jax.random.key(seed), np.uint32(step), prompts, samples))


@jax.jit
def turn_keys(keys: np.ndarray, turn: int) -> jax.Array:
    """The raw keys of a later turn, folded from those of the first."""

    def one(key):
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), turn))

    return jax.vmap(one)(keys)


@jax.jit
def _fold(base, step, prompts, samples):
    base = jax.random.fold_in(base, step)

    def one(prompt, sample):
        return jax.random.fold_in(jax.random.fold_in(base, prompt), sample)

    return jax.random.key_data(jax.vmap(one)(prompts, samples))
