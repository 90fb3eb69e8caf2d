"""MA-RLHF: generalised advantages over macro actions of several tokens."""

import jax.numpy as jnp

from losses.catalogue import nearest, paper
from losses.ops.returns import generalised_advantages
from losses.ops.turns import to_tokens, turn_mask, turn_mean, turn_sum

REDUCTIONS = ("mean", "sum")


@paper(
    "ma-rlhf",
    kind="advantage",
    base="ppo",
    title="MA-RLHF: Reinforcement Learning from Human Feedback with Macro Actions",
    arxiv="2410.02743",
    year=2024,
)
def ma_rlhf_advantage(
    token_rewards, values, mask, *, n=5, gamma=1.0, lam=0.95, reward_reduce="mean"
):
    """GAE over chunks of n tokens, the same advantage on every token of a chunk, [B,T].

        ranks 0..N-2 of a row's N valid tokens in chunks of n, rank N-1 alone
        V_k = mean of values over chunk k,   R_k = mean (or sum) of token_rewards
        delta_k = R_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lam A_{k+1}
        A_t = A_k for t in chunk k

    V and A are 0 beyond the last chunk. Chunks run on through masked gaps. n = 1 is GAE.

    Args:
      token_rewards: [B,T].
      values: [B,T], those of the start of the update.
      mask: [B,T].
      n: tokens per macro action, a static count.
      gamma, lam: discount and trace decay, per macro action.
      reward_reduce: "mean" (the authors' code) or "sum".

    Returns:
      advantages [B,T], constant and not whitened.

    Raises:
      ValueError: unknown reward_reduce, or n < 1.

    Reference: Chai et al. 2024, arXiv 2410.02743. The authors' code inserts an empty action where n
    divides N - 1 and takes a batch's boundaries from its first row; neither is reproduced. Its
    value targets are A_k + V_k, repeated over the chunk (`macro_targets`); composed with `ppo_loss`
    the critic keeps that loss's own token-level targets.
    """
    if n < 1:
        raise ValueError(f"n is the number of tokens per macro action, at least 1; got {n}.")
    if reward_reduce not in REDUCTIONS:
        raise ValueError(
            f"Unknown reward_reduce {reward_reduce!r}.{nearest(reward_reduce, REDUCTIONS)} "
            f"One of {', '.join(REDUCTIONS)}."
        )
    chunk, slots = macro_actions(mask, n)
    reduce = turn_mean if reward_reduce == "mean" else turn_sum
    by_chunk = generalised_advantages(
        reduce(token_rewards, chunk, mask, slots),
        turn_mean(values, chunk, mask, slots),
        turn_mask(chunk, mask, slots),
        gamma,
        lam,
    )
    return to_tokens(by_chunk, chunk, mask)


def macro_actions(mask, n):
    """Index of each valid token's chunk of n, the last token alone: [B,T] int, number of slots."""
    valid = (mask > 0).astype(jnp.int32)
    place = jnp.cumsum(valid, axis=-1) - 1
    final = jnp.sum(valid, axis=-1, keepdims=True) - 1
    chunk = jnp.where(place == final, -(-final // n), place // n)
    return jnp.maximum(chunk, 0), -(-(mask.shape[1] - 1) // n) + 1


def macro_targets(advantages, values, mask, *, n=5):
    """Value targets A_k + V_k of every token of chunk k, [B,T], from `ma_rlhf_advantage`'s A."""
    chunk, slots = macro_actions(mask, n)
    pooled = to_tokens(turn_mean(values, chunk, mask, slots), chunk, mask)
    return jnp.where(mask > 0, advantages + pooled, 0.0)
