"""ADRS: self-distilled reward shaping, a small gated token term on the outcome advantage."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean, masked_sum, masked_var, select
from losses.ops.turns import slot_max, slot_sum, slots


@paper(
    "adrs",
    kind="advantage",
    base="grpo",
    title="Agentic Reinforcement Learning with Self-Distilled Reward Shaping",
    arxiv="2608.03223",
    year=2026,
    stages={"objective": ("grpo_loss", {"beta": 0.01})},
)
def adrs_advantage(
    rewards,
    group_ids,
    teacher_logprobs,
    mask,
    step_ids,
    *,
    eta=0.02,
    tau=2.0,
    temperature=1.0,
    clip=0.2,
    adaptive_clip=True,
    renormalize=True,
    eps=1e-6,
):
    """The outcome advantage plus a bounded term from the skill-informed log-probabilities, [B,T].

        q_t    = teacher_logprobs_t - mean of its step, then / (std of the row + 1e-8)
        al_i   = sigmoid( (conf_i - mean conf) / temperature ),   conf_i = mean_t teacher_logprobs
        TVA_g  = sum al r / sum al - sum (1 - al) r / sum (1 - al)        of the group
        s_t    = sigmoid(tau TVA_g) q_t
        y_t    = s_t, or with `renormalize` (s_t - mean) / std over the group's tokens, n - 1
        b_g    = clip min(1, sd_g / (med + eps)), or clip without `adaptive_clip`
        value  = m ( (r_i - mean_g r) / (sd_g + eps) + clamp(eta y_t, -b_g, b_g) )

    sd_g is the spread of the group's rewards (n - 1) and med its lower median over the groups of
    two or more rows with sd_g >= 1e-6 (1 if there is none). Other groups get no token term; a group
    of one has A = r and TVA = 0. A row without tokens is left out of mean conf and has al = 1/2.
    With `renormalize` the gate, one number per group, cancels: tau has no effect.

    Args:
      rewards: [B];  group_ids: [B] int.
      teacher_logprobs: [B,T] of the same weights with the task's skill in the prompt.
      mask, step_ids: [B,T].
      eta: weight of the token term; the schedule (0, then eta, then 0) is the caller's.
      tau, temperature: of the gate and of the confidence.
      clip: bound on the token term; None: none.
      adaptive_clip: tighten it in groups whose rewards spread less than the median group's.
      renormalize: True as released, False as the abstract reads.
      eps: added to the reward spreads.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2608.03223. The released code keeps 1e-8 in the variance of y, left out here.
    """
    size = groups.group_size(group_ids, dtype=rewards.dtype)
    spread = groups.group_std(rewards, group_ids)
    shaped = (size > 1) & (spread >= 1e-6)
    outcome = jnp.where(size > 1, groups.standardised(rewards, group_ids, eps=eps), rewards)

    q = _centred_in_steps(teacher_logprobs, mask, slots(step_ids, mask))
    q = q / (jnp.sqrt(masked_var(q, mask, axis=-1, keepdims=True)) + 1e-8)
    if renormalize:
        term = _standardised_in_groups(q, mask, group_ids)
    else:
        value_added = _confidence_gain(rewards, group_ids, teacher_logprobs, mask, temperature)
        term = jax.nn.sigmoid(tau * value_added)[:, None] * q
    term = eta * term
    if clip is not None:
        bound = jnp.full_like(rewards, clip)
        if adaptive_clip:
            bound = clip * jnp.minimum(1, spread / (_lower_median(spread, shaped, group_ids) + eps))
        term = jnp.clip(term, -bound[:, None], bound[:, None])
    return select(outcome[:, None] + jnp.where(shaped[:, None], term, 0.0), mask)


def _centred_in_steps(x, mask, slot):
    """x minus the mean of its step, exactly 0 in steps of equal values, [B,T]."""
    n = jnp.maximum(slot_sum(jnp.ones_like(x), slot, mask), 1)
    mean = slot_sum(x, slot, mask) / n
    equal = slot_max(x, slot, mask) <= -slot_max(-x, slot, mask)
    of_step = jnp.take_along_axis(jnp.where(equal, jnp.nan, mean), slot, axis=1)
    return select(jnp.where(jnp.isnan(of_step), 0.0, x - of_step), mask)


def _standardised_in_groups(x, mask, group_ids):
    """(x - mean) / std over the valid tokens of the group, n - 1; 0 where the std is 0, [B,T]."""
    n = groups.group_sum(lengths(mask), group_ids)
    mean = groups.group_sum(masked_sum(x, mask, axis=-1), group_ids) / jnp.maximum(n, 1)
    centred = x - mean[:, None]
    total = groups.group_sum(masked_sum(centred**2, mask, axis=-1), group_ids)
    std = jnp.sqrt(total / jnp.maximum(n - 1, 1))[:, None]
    return jnp.where(std > 0, centred / jnp.where(std > 0, std, 1.0), 0.0)


def _confidence_gain(rewards, group_ids, teacher_logprobs, mask, temperature):
    """Reward of confident responses minus that of unconfident ones, in the group, [B]."""
    valid = jnp.minimum(lengths(mask), 1)
    confidence = masked_mean(teacher_logprobs, mask, axis=-1)
    above = jnp.where(valid > 0, confidence - masked_mean(confidence, valid), 0.0) / temperature

    def mean_reward(log_weight):
        # The largest weight of the group is divided out: sigmoids may underflow together.
        weight = jnp.exp(log_weight - groups.group_max(log_weight, group_ids))
        return groups.group_sum(weight * rewards, group_ids) / groups.group_sum(weight, group_ids)

    return mean_reward(jax.nn.log_sigmoid(above)) - mean_reward(jax.nn.log_sigmoid(-above))


def _lower_median(spread, shaped, group_ids):
    """Lower median of one value per group over the groups that count; 1 if none does."""
    counted = shaped & groups.first_in_group(group_ids)
    ordered = jnp.sort(jnp.where(counted, spread, jnp.inf))
    n = jnp.sum(counted)
    return jnp.where(n > 0, ordered[jnp.maximum(n - 1, 0) // 2], 1.0)
