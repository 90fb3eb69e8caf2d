"""T-SPMO: a token is credited only where the responses of its prompt branch."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean, masked_sum, select


@paper(
    "s-grpo-tspmo",
    kind="objective",
    title="Token-Efficient RL for LLM Reasoning (Reinforcement Learning for LLM Reasoning Under "
    "Memory Constraints)",
    arxiv="2504.20834",
    year=2025,
    metric="branch_fraction",
)
def tspmo_loss(logprobs, tokens, mask, rewards, group_ids):
    """Probability of a token times how much better responses that took it at a shared prefix did.

        R(p)    = rewards of the group's responses with prefix p and a valid token after it
        R(p,v)  = those whose next token is v;  U = all pairs (p,v) of the group
        A(v|p)  = mean R(p,v) - mean R(p)
        loss    = - mean over groups of (1/|U|) sum_U A(v|p) pi(v|p),   pi = exp(logprobs)

    A prefix is all tokens before a position, masked ones included. Responses that share a pair
    share its term, and its gradient, alike. Groups without tokens are not counted; none: loss 0.
    Memory grows with B^2 T.

    Args:
      logprobs, mask: [B,T].
      tokens: [B,T] int.
      rewards: [B].
      group_ids: [B] int.

    Returns:
      (loss, metrics).

    Reference: Lee and Tong 2025, arXiv 2504.20834, abstract and opening only: the probability in
    place of its logarithm, the division by |U| and the mean over groups are assumed.
    """
    live = mask > 0
    alike = tokens[:, None, :] == tokens[None, :, :]
    differed = jnp.cumsum(~alike, axis=-1)
    same_prefix = (differed - ~alike) == 0
    members = groups.same_group(group_ids)[:, :, None] & live[:, None, :] & live[None, :, :]
    at_prefix = members & same_prefix
    at_pair = at_prefix & alike

    # Advantages do not change when a group's rewards are shifted; centred ones are exactly 0 in a
    # group that agrees.
    centred = groups.centred(rewards, group_ids)

    def over_members(where):
        n = jnp.maximum(jnp.sum(where, axis=1), 1).astype(logprobs.dtype)
        return n, jnp.sum(jnp.where(where, centred[None, :, None], 0), axis=1) / n

    n_prefix, value_of_prefix = over_members(at_prefix)
    n_pair, value_of_pair = over_members(at_pair)
    branches = select((n_prefix > n_pair).astype(logprobs.dtype), mask)
    advantages = select(value_of_pair - value_of_prefix, branches)

    pairs = groups.group_sum(masked_sum(1 / n_pair, mask, axis=1), group_ids)
    gain = masked_sum(advantages * jnp.exp(logprobs) / n_pair, mask, axis=1)
    occupied = groups.group_max(lengths(mask), group_ids) > 0
    number = jnp.sum(groups.first_in_group(group_ids) & occupied)
    loss = -jnp.sum(gain / jnp.where(pairs > 0, pairs, 1.0)) / jnp.maximum(number, 1)
    metrics = {
        "branch_fraction": masked_mean(branches, mask),
        "advantage_abs": masked_mean(jnp.abs(advantages), mask),
        "surprisal": -masked_mean(jax.lax.stop_gradient(logprobs), mask),
    }
    return loss, metrics


def s_grpo_token_mask(mask, uniforms, *, cutoff=100, prob=0.3, max_tokens=100):
    """The random subset of tokens that enters the loss of S-GRPO, [B,T] of 0 and 1.

    A valid token is included if fewer than `cutoff` valid tokens of its row precede it, or if its
    uniform number is below `prob`; of these the first `max_tokens` of each row. The loss is GRPO's
    with this mask, normalised by it.

    Args:
      mask: [B,T].
      uniforms: [B,T] uniform random numbers in [0, 1).
      cutoff, prob, max_tokens: as above (assumed values).
    """
    live = jnp.asarray(mask) > 0
    before = jnp.cumsum(live, axis=1) - live
    included = live & ((before < cutoff) | (jnp.asarray(uniforms) < prob))
    included = included & (jnp.cumsum(included, axis=1) <= max_tokens)
    return included.astype(jnp.result_type(float))
