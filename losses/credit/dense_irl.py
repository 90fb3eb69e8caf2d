"""Dense reasoning reward by adversarial inverse reinforcement learning from expert traces."""

import jax
import jax.numpy as jnp
import optax

from losses.catalogue import nearest, paper
from losses.ops import groups
from losses.ops.masked import last_valid, masked_mean, masked_sum, select
from losses.ops.returns import reward_to_go

LOSSES = ("bce", "wgan")
NO_DISCOUNT = 1e-3


@paper(
    "dense-irl",
    kind="advantage",
    base="grpo",
    title="Learning a Dense Reasoning Reward Model from Expert Demonstration via Inverse "
    "Reinforcement Learning",
    arxiv="2510.01857",
    year=2025,
)
def irl_dense_advantage(token_rewards, mask, group_ids, *, gamma=0.9, eps=1e-4):
    """Discounted sums of discriminator logits, standardised by those of the last tokens, [B,T].

        rho_i = token_rewards at the last valid position of row i
        a_it  = (r_it - mean_g rho) / (std_g rho + eps)            std unbiased
        A_it  = a_it + gamma A_i,next(t)                           next valid position; 0 beyond

    A masked gap costs no factor gamma. Fully masked rows stay out of the statistics. One usable
    row in the group, or all rho equal: a = (r - rho) / eps; avoid such groups. The expert trace of
    a prompt is one more row of its group.

    Args:
      token_rewards: [B,T] discriminator logits.
      mask: [B,T].
      group_ids: [B] int.
      gamma: discount; 0.001 and less count as 0, as in the code.
      eps: added to the standard deviation.

    Returns:
      advantages [B,T], constant.

    Reference: Fanconi et al. 2025, arXiv 2510.01857, and its code, whose right-alignment by
    dropping entries equal to 0 is not reproduced.
    """
    used = jnp.any(mask > 0, axis=-1)
    last = jnp.sum(token_rewards * last_valid(mask), axis=-1)
    # An equal group's mean is its value: the small eps would blow up a rounding error.
    equal = groups.all_equal(last, group_ids, used)
    mean = jnp.where(equal, last, groups.group_mean(last, group_ids, used))
    std = groups.group_std(last, group_ids, ddof=1, valid=used)
    scaled = select((token_rewards - mean[:, None]) / (std[:, None] + eps), mask)
    return scaled if gamma <= NO_DISCOUNT else reward_to_go(scaled, mask, gamma)


def irl_discriminator_loss(token_logits, mask, labels, weights, *, label_smoothing=0.1, loss="bce"):
    """Token-level discriminator of expert rows against policy and damaged rows.

        bce:  sum_i w_i mean_t BCE(d_it, y_i) / sum_i w_i,   y = 1 - e/2 (expert) or e/2, logits d
        wgan: mean d over all other valid tokens - mean d over all expert ones

    Fully masked rows have weight 0; no weight at all gives 0; an empty class has mean 0.

    Args:
      token_logits: [B,T] d, differentiable.
      mask: [B,T].
      labels: [B] 1 for expert rows, 0 for policy and damaged ones.
      weights: [B]; 1 for policy rows, the number of policy rows times 2 for an expert row (times 1
        without damaged rows), so that both classes weigh alike. Read by "bce" only.
      label_smoothing: e.
      loss: "bce" or "wgan".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown loss.
    """
    mask = jnp.asarray(mask, token_logits.dtype)
    expert = mask * (labels > 0)[:, None]
    other = mask * (labels <= 0)[:, None]
    gap = masked_mean(token_logits, expert) - masked_mean(token_logits, other)
    metrics = {"logit_gap": jax.lax.stop_gradient(gap)}
    if loss == "wgan":
        return -gap, metrics
    if loss != "bce":
        raise ValueError(f"Unknown loss {loss!r}.{nearest(loss, LOSSES)} One of bce, wgan.")
    target = jnp.where(labels > 0, 1 - label_smoothing / 2, label_smoothing / 2)
    logits = select(token_logits, mask)
    by_token = optax.sigmoid_binary_cross_entropy(logits, target[:, None].astype(logits.dtype))
    weights = weights * jnp.any(mask > 0, axis=-1)
    total = jnp.sum(weights)
    value = masked_sum(masked_mean(by_token, mask, axis=-1) * weights, weights)
    return value / jnp.where(total > 0, total, 1.0), metrics
