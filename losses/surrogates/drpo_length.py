"""DRPO: shorter answers by weights among the correct ones, in a discriminative objective."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean
from losses.ops.ratios import log_ratio


@paper(
    "drpo-length",
    kind="objective",
    title="DRPO: Efficient Reasoning via Decoupled Reward Policy Optimization",
    arxiv="2510.04474",
    year=2025,
    metric="weighted_length",
)
def drpo_length_loss(
    logprobs,
    old_logprobs,
    mask,
    rewards,
    group_ids,
    *,
    lam=0.1,
    tau=10,
    delta=1e-4,
    beta=1e3,
    max_length=None,
):
    """Mean log-likelihood of the correct, short ones first, above a soft maximum of the wrong.

        s_b     = sum_t m logprobs / sum_t m
        omega_i = softmax over P_g of (1 - |m_i| / max_length) / lam
        J_g     = sum_{i in P_g} omega_i s_i - tau log( mean_{j in N_g} exp(s_j / tau) )
        k       = sum m (old_logprobs - logprobs) / sum m
        loss    = - (1/G) sum_g J_g + (beta/2) max(k - delta, 0)^2

    P_g: rewards > 0.5, N_g: the others, rows without a valid token in neither. Groups of one kind
    add 0 and count in G. omega is constant: length moves weight between correct answers only.

    Args:
      logprobs, old_logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      lam: temperature of the length preference; inf: none (DisCO).
      tau: temperature of the soft maximum.
      delta, beta: threshold, nats per token, and weight of the hinge on the drift.
      max_length: the run's response limit in tokens; None: T.

    Returns:
      (loss, metrics).

    Reference: arXiv 2510.04474. The authors' code has these gradients with other values: its
    negative part is a quotient equal to 1, its hinge stop_grad(beta max(k - delta, 0)) k.
    """
    limit = mask.shape[1] if max_length is None else max_length
    tokens = lengths(mask)
    score = masked_mean(logprobs, mask, axis=-1)
    positive = (tokens > 0) & (rewards > 0.5)
    negative = (tokens > 0) & ~(rewards > 0.5)
    wrong = groups.group_size(group_ids, negative, score.dtype)
    both = (groups.group_size(group_ids, positive) > 0) & (wrong > 0)
    brevity = (1 - tokens / limit) / lam
    omega = jnp.exp(brevity - groups.group_logsumexp(brevity, group_ids, positive))
    omega = jnp.where(positive & both, omega, 0.0)
    against = groups.group_logsumexp(score / tau, group_ids, negative)
    against = tau * (against - jnp.log(jnp.maximum(wrong, 1)))
    number = groups.number_of_groups(group_ids, score.dtype)
    drift = -masked_mean(log_ratio(logprobs, old_logprobs, mask), mask)
    hinge = beta / 2 * jnp.where(drift > delta, drift - delta, 0.0) ** 2
    total = jnp.sum(omega)
    metrics = {
        "weighted_length": jnp.sum(omega * tokens) / jnp.where(total > 0, total, 1.0),
        "usable_group_fraction": total / number,
        "approx_kl": drift,
        "hinge": hinge,
    }
    return -jnp.sum(omega * (score - against)) / number + hinge, metrics
