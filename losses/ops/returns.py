"""Returns and generalised advantages along a response; masked positions are skipped."""

import jax
import jax.numpy as jnp

from losses.ops.masked import last_valid, select


def outcome_to_tokens(rewards, mask):
    """Puts each response's outcome reward on its last valid token: [B] -> [B,T]."""
    return rewards[:, None] * last_valid(mask)


def reward_to_go(token_rewards, mask, gamma=1.0):
    """Discounted sum of the rewards from t on, masked positions skipped, 0 there, [B,T]."""
    zeros = jnp.zeros_like(token_rewards)
    return generalised_advantages(token_rewards, zeros, mask, gamma, 1.0)


def generalised_advantages(token_rewards, values, mask, gamma, lam):
    """GAE over the valid positions of each row, [B,T].

        delta_t = r_t + gamma V_{t+} - V_t,   A_t = delta_t + gamma lam A_{t+}

    t+ is the next valid position of the row; V and A are 0 beyond the last one.
    """
    r, v = select(token_rewards, mask), select(values, mask)

    def back(carry, column):
        next_value, next_advantage = carry
        r_t, v_t, m_t = column
        advantage = r_t + gamma * next_value - v_t + gamma * lam * next_advantage
        carry = (jnp.where(m_t, v_t, next_value), jnp.where(m_t, advantage, next_advantage))
        return carry, jnp.where(m_t, advantage, 0.0)

    start = jnp.zeros_like(r[:, 0])
    columns = (r.T, v.T, (mask > 0).T)
    return jax.lax.scan(back, (start, start), columns, reverse=True)[1].T
