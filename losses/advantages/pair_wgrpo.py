"""Pair-WGRPO: rare successes of a hard prompt against rare failures of an easy one."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from losses.arrays import Rows
from losses.catalogue import paper
from losses.ops import groups


@paper(
    "pair-wgrpo",
    kind="advantage",
    base="grpo",
    title="Beyond Variance: Prompt-Efficient RLVR via Rare-Event Amplification and Bidirectional "
    "Pairing",
    arxiv="2602.03452",
    year=2026,
)
def pair_wgrpo_advantage(
    rewards, group_ids, pair_ids: Int[Array, "B"], pair_role: Rows, *, w_pos=1.0, w_neg=1.0,
    eps=1e-6,
):  # fmt: skip
    """Rare outcomes of a pair of prompts, standardised over the pair, [B].

        z_i =  w_pos  on the hard prompt (role +1) if right (reward > 0.5)
            = -w_neg  on the easy prompt (role -1) if wrong,   else 0
        A_i = (z_i - mean z) / (std z + eps)               over both prompts, std unbiased

    A pair without a rare outcome gives exactly 0.

    Args:
      rewards: [B] binary.
      group_ids: [B] int, the prompt; not read by the normalisation.
      pair_ids: [B] int, the pair.
      pair_role: [B] +1 for the hard prompt's responses, -1 for the easy one's.
      w_pos, w_neg: weights of rare successes and failures.
      eps: added to the standard deviation.

    Returns:
      advantages [B], constant.

    Reference: arXiv 2602.03452, abstract only: the joint normalisation is inferred, expected
    outcomes get no weight, and the weights are assumed.
    """
    right = rewards > 0.5
    z = jnp.where((pair_role > 0) & right, w_pos, 0.0)
    z = jnp.where((pair_role < 0) & ~right, -w_neg, z).astype(rewards.dtype)
    return groups.standardised(z, pair_ids, eps=eps)


def select_pairs(success_rate, *, hard=(0.0, 0.3), easy=(0.7, 1.0), n_pairs=1):
    """Pairs a hard but solvable prompt with an easy but brittle one.

    Hard prompts, of rate in (hard[0], hard[1]], lowest first, meet easy prompts, of rate in
    [easy[0], easy[1]), highest first; of equal rates the lower index first. Rates of 0 and 1 are
    never chosen.

    Args:
      success_rate: [P] share of right responses of each prompt.
      hard, easy: the bands (assumed).
      n_pairs: pairs wanted.

    Returns:
      [n_pairs,2] int, the hard and the easy prompt; -1 in both where the bands hold no more.
    """
    rate = jnp.asarray(success_rate, jnp.result_type(float))
    open_ = (rate > 0) & (rate < 1)

    def first(inside, key):
        order = jnp.argsort(jnp.where(inside, key, jnp.inf), stable=True)
        chosen = jnp.where(jnp.arange(rate.shape[0]) < jnp.sum(inside), order, -1)
        return jnp.pad(chosen, (0, max(n_pairs - rate.shape[0], 0)), constant_values=-1)[:n_pairs]

    pairs = jnp.stack(
        [
            first(open_ & (rate > hard[0]) & (rate <= hard[1]), rate),
            first(open_ & (rate >= easy[0]) & (rate < easy[1]), -rate),
        ],
        axis=1,
    )
    return jnp.where(jnp.any(pairs < 0, axis=1, keepdims=True), -1, pairs)
