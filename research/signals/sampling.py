"""Signals of how responses were sampled, and numbers that a paper draws or starts from."""

import numpy as np

from losses.ops.divergences import log_softmax, of_token
from losses.surrogates.invalid_action_masking import EXCLUDED
from research.rollouts import allowed_tokens
from research.signals import Context, random_state, signal
from research.signals.spans import spoken_turns

SURE = 0.9
"""Probability from which the parallel decoder takes a token without looking at it again."""


@signal("tpf")
def tpf(context: Context) -> np.ndarray:
    """Tokens per forward pass of a decoder that goes on while it is sure, [B] (lightningrl).

    A pass takes one token, and the ones behind it while their probability is above 0.9.
    """
    rollout = context.rollout
    unsure = (np.exp(rollout.logprobs) <= SURE) * rollout.mask
    unsure[:, 0] = rollout.mask[:, 0]  # the first token always takes a pass
    return (rollout.mask.sum(1) / np.maximum(unsure.sum(1), 1)).astype(np.float32)


@signal("correct", given="tpf")
def correct_in_time(context: Context) -> np.ndarray:
    """Right, and not cut off by the length limit, [B] (lightningrl)."""
    return context.rollout.correct * ~context.rollout.truncated


@signal("valid_tokens")
def valid_tokens(context: Context) -> np.ndarray:
    """Which tokens `sampling.allowed` lets the sampler draw, [B,T,V] (invalid-action-masking)."""
    rollout, s = context.rollout, context.config.sampling
    size = context.tokenizer.vocab_size
    valid = np.ones((*rollout.tokens.shape, size), np.float32)
    allowed = allowed_tokens(context.tokenizer, s.allowed, s.max_new_tokens)
    if allowed is not None:
        for turn in spoken_turns(rollout):
            valid[turn.row, turn.places] = allowed[: len(turn.places)]
    return valid


@signal("old_logprobs", given="valid_tokens")
def restricted_logprobs(context: Context) -> np.ndarray:
    """The policy restricted to the valid tokens, before the update, [B,T]."""
    logits = context.statistics("policy", ("logits",))["logits"]
    log_p = log_softmax(np.where(valid_tokens(context) > 0, logits, EXCLUDED))
    return np.asarray(of_token(log_p, context.rollout.tokens))


@signal("select_scores")
def select_scores(context: Context) -> np.ndarray:
    """Uniform random numbers, drawn afresh each step, [B,T] (clip-cov)."""
    return random_state(context, 1).random(context.rollout.tokens.shape, np.float32)


@signal("baseline_state")
def baseline_state(context: Context) -> np.ndarray:
    """Mean and count of the moving-average baseline before its first update (acegen-reinforce)."""
    return np.array([0.0, 0.001], np.float32)
