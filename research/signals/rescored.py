"""Signals of the same responses under other prompts: evidence taken away, hints that differ."""

import jax.numpy as jnp
import numpy as np

from models import scoring
from research.signals import Context, signal
from research.signals.contexts import CONTEXTS, behind, siblings
from research.signals.prompts import without_criterion

WRONG_HINTS = 4
"""RLCSD: wrong solutions that each response is scored behind."""


def _under(context: Context, name: str) -> np.ndarray:
    prompts = CONTEXTS[name](context)
    return context.rescore("policy", ("logprobs",), prompts)["logprobs"]


@signal("masked_logprobs")
def masked_logprobs(context: Context) -> np.ndarray:
    """The responses with the evidence blanked out, [B,T] (video-ktr)."""
    return _under(context, "blank")


@signal("shuffled_logprobs")
def shuffled_logprobs(context: Context) -> np.ndarray:
    """The responses with the pieces of evidence in another order, [B,T] (video-ktr)."""
    return _under(context, "shuffled")


@signal("counterfactual_logprobs")
def counterfactual_logprobs(context: Context) -> np.ndarray:
    """The responses under prompts without what they should depend on, [B,T].

    Half of the evidence's characters blanked out where there is evidence (vppo), else the
    criterion left out (cort-rubric).
    """
    if "evidence" in context.rollout.records[0].info:
        return _under(context, "damaged")
    return without_criterion(context)


def divergence(config, params, rows):
    """KL of the predictions from two sets of hidden states: {"kl": [b,T]} nats."""
    found = scoring.token_statistics(
        config,
        params,
        rows["full"],
        rows["tokens"][:, -rows["mask"].shape[1] :],
        {"kl": scoring.reverse_kl},
        others=((config, params, rows["bare"]),),
        temperature=rows["temperature"][0],
    )
    return {"kl": jnp.maximum(found["kl"], 0.0)}


@signal("dependency")
def dependency(context: Context) -> np.ndarray:
    """KL of the predictions with the evidence from those without it, nats, [B,T] (pgpo)."""
    full = context.statistics("policy", ("hidden",))["hidden"]
    bare = context.rescore("policy", ("hidden",), CONTEXTS["blank"](context))["hidden"]
    heat = np.full(len(full), context.config.sampling.temperature, np.float32)
    found = context.measure(divergence, full=full, bare=bare, temperature=heat)
    return found["kl"] * context.rollout.mask


def _wrong_hints(context):
    """Log-probabilities [B,K,T] behind wrong siblings, and which of them exist [B,K]."""
    hints = siblings(context, right=False, count=WRONG_HINTS)
    right = np.array([h is not None for h in siblings(context, right=True, count=1)[0]])
    scored = [
        context.rescore("teacher", ("logprobs",), behind(context, row_hints))["logprobs"]
        for row_hints in hints
    ]
    exist = np.array([[h is not None for h in row_hints] for row_hints in hints]).T
    return np.stack(scored, axis=1), (exist & right[:, None]).astype(np.float32)


@signal("wrong_logprobs", models=("teacher",))
def wrong_logprobs(context: Context) -> np.ndarray:
    """The responses behind each of up to four wrong siblings, [B,4,T] (rlcsd)."""
    return context.once(_wrong_hints)[0]


@signal("wrong_mask", models=("teacher",))
def wrong_mask(context: Context) -> np.ndarray:
    """Wrong siblings that exist; none where no right one does, [B,4] (rlcsd)."""
    return context.once(_wrong_hints)[1]
