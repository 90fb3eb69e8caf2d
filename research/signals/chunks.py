"""OmniOPD: chunks of the responses that a teacher without logits audits by continuing them."""

from collections.abc import Sequence

import numpy as np

from losses.distillation.omniopd import select_chunks
from research.rollouts import history
from research.signals import Context, signal

CHUNKS, CHUNK_SIZE = 4, 16
"""Most chunks of a response, and tokens of each; a quarter of the response where it is short."""
_SALT = 1 << 22  # apart from the numbers of the run's prompts: other random keys


def _present(rollout):
    return rollout.mask if rollout.present is None else rollout.present


def _size(context):
    return min(CHUNK_SIZE, max(context.rollout.mask.shape[1] // 4, 2))


def _chunk_ids(context):
    entropy = context.statistics("policy", ("entropy",))["entropy"]
    size = _size(context)
    return np.asarray(
        select_chunks(entropy, context.rollout.mask, n_chunks=CHUNKS, chunk_size=size)
    )


@signal("chunk_ids")
def chunk_ids(context: Context) -> np.ndarray:
    """Chunk of each token, at the policy's most uncertain places, -1 for none, [B,T] (omniopd)."""
    return context.once(_chunk_ids).astype(np.int32)


@signal("chunk_support", models=("teacher",))
def chunk_support(context: Context) -> np.ndarray:
    """Summed similarity of the teacher's continuations to each chunk, [B,C] (omniopd).

    The teacher continues what stands before the chunk, which it does not see; similarity is the
    overlap of token bigrams.
    """
    rollout, ids, size = context.rollout, context.once(_chunk_ids), _size(context)
    count = context.config.objective.n_rollouts
    rows = np.repeat(np.arange(len(rollout)), CHUNKS)
    slots = np.tile(np.arange(CHUNKS), len(rollout))
    inside = ids[rows] == slots[:, None]
    first = np.where(inside.any(1), inside.argmax(1), 0)
    seen = (np.arange(ids.shape[1]) < first[:, None]) * _present(rollout)[rows]
    prefixes = history(
        rollout.prompts[rows],
        rollout.prompt_positions[rows],
        {"tokens": rollout.tokens[rows], "present": seen},
        context.tokenizer.pad_id,
    )
    found = context.continuations("teacher", *prefixes, group_size=count, salt=_SALT)
    out = np.zeros((len(rollout), CHUNKS), np.float32)
    for n in np.flatnonzero(inside.any(1)):
        chunk = rollout.tokens[rows[n]][inside[n]].tolist()
        for k in range(n * count, (n + 1) * count):
            other = found["tokens"][k][found["mask"][k] > 0][:size].tolist()
            out[rows[n], slots[n]] += overlap(chunk, other)
    return out


def overlap(one: Sequence[int], other: Sequence[int]) -> float:
    """Shared bigrams of two sequences over the bigrams of the longer, in [0, 1]."""
    pairs = [list(zip(s, s[1:])) for s in (one, other)]
    longest = max(map(len, pairs))
    if not longest:
        return float(list(one) == list(other))
    shared = sum(min(pairs[0].count(p), pairs[1].count(p)) for p in set(pairs[0]))
    return shared / longest
