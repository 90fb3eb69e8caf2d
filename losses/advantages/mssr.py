"""MSSR: one rollout per prompt, a Beta posterior as baseline, entropy added to the advantage."""

import jax.numpy as jnp

from losses.arrays import Rows
from losses.catalogue import paper
from losses.ops.masked import select, standardise

_PAPER = {
    "title": "Stable and Efficient Single-Rollout RL for Multimodal Reasoning",
    "arxiv": "2512.18215",
    "year": 2025,
}


@paper("mssr", kind="advantage", companion=True, **_PAPER)
def mssr_advantage(rewards, prompt_values: Rows):
    """Reward minus the prompt's estimated success rate, standardised over the batch, [B].

        A_b = (d_b - mean d) / (std d + 1e-6),   d_b = r_b - v(x_b)          std unbiased

    Args:
      rewards: [B] in [0, 1].
      prompt_values: [B] v(x) of each row's prompt, before this step's update (`beta_estimate`).

    Returns:
      advantages [B], constant.
    """
    return standardise(rewards - prompt_values, jnp.ones_like(rewards), eps=1e-6)


@paper(
    "mssr",
    kind="credit",
    base="ppo",
    stages={
        "advantage": "mssr_advantage",
        "objective": ("grpo_loss", {"beta": 0.001, "aggregation": "token_mean"}),
    },
    **_PAPER,
)
def mssr_credit(advantages, entropy, mask, *, gamma=2.0, lam=0.4):
    """Advantage plus a bounded share of the token's entropy, [B,T].

        psi_it = min( |A_it| / gamma, lam H_it ),   out_it = m_it (A_it + psi_it)

    psi adds to a positive advantage and softens a negative one; gamma > 1 keeps the sign. A = 0
    gives 0.

    Args:
      advantages, mask: [B,T].
      entropy: [B,T] of the policy, nats, constant here.
      gamma: psi is at most |A| / gamma.
      lam: weight of the entropy.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2512.18215, at second hand, where the two numbers appear swapped; the pair of
    the earlier entropy-shaping work is used. The weight of the KL term of the composition is
    assumed.
    """
    return select(advantages + jnp.minimum(jnp.abs(advantages) / gamma, lam * entropy), mask)


def beta_estimate(state):
    """Success rate alpha / (alpha + beta) of each prompt, from state [P,2], at first ones: [P]."""
    return state[:, 0] / jnp.sum(state, axis=1)


def beta_update(state, rewards, prompts, eta):
    """Next Beta states of the prompts that were answered.

        alpha <- eta alpha + r,   beta <- eta beta + (1 - r)

    Args:
      state: [P,2] (alpha, beta) of every prompt.
      rewards: [B] in [0, 1].
      prompts: [B] int, the prompt of each response, each at most once.
      eta: factor of forgetting, of `beta_forgetting`.

    Returns:
      state [P,2].
    """
    outcome = jnp.stack([rewards, 1 - rewards], axis=1)
    return state.at[prompts].set(eta * state[prompts] + outcome)


def beta_forgetting(mean_kl, *, kl_target=0.01, eta_min=0.875, eta_max=0.96):
    """eta = eta_max - min(mean_kl / kl_target, 1) (eta_max - eta_min): drift forgets faster.

    Args:
      mean_kl: mean KL to the reference over the last steps (the paper: 20), 0 before the first.
      kl_target: KL at which forgetting is fastest.
      eta_min, eta_max: its bounds (assumed).

    Returns:
      eta, a scalar.
    """
    return eta_max - jnp.minimum(mean_kl / kl_target, 1.0) * (eta_max - eta_min)
