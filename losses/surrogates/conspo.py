"""ConSPO: a group-wise contrast of correct against wrong responses."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean


@paper(
    "conspo",
    kind="objective",
    title="Revisiting Reinforcement Learning with Verifiable Rewards from a Contrastive "
    "Perspective",
    arxiv="2605.12969",
    year=2026,
    metric="contrast_probability",
)
def conspo_loss(logprobs, mask, rewards, group_ids, *, tau=0.1, margin=0.0, positive_threshold=0.5):
    """InfoNCE on mean log-likelihoods: each correct response against all wrong ones of its group.

        s_b = sum_t m logprobs / sum_t m,   z_i = (s_i - margin) / tau
        l_i = log( exp(z_i) + sum_{j in N_g} exp(s_j / tau) ) - z_i          i in P_g
        loss = mean over groups with both kinds of mean_{i in P_g} l_i

    P_g: rewards > positive_threshold, N_g: the others; rows without a valid token are in neither.
    Differentiated through both sides; no ratio, no clip, no advantage. No usable group: 0.

    Args:
      logprobs, mask: [B,T].
      rewards: [B].
      group_ids: [B] int.
      tau: temperature of the contrast.
      margin: at the current step; the paper lets it grow in training (here: min(1, 2 step / steps)
        times 0.5, to be passed in by the caller).
      positive_threshold: rewards above it are correct.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.12969, built from the abstract: the denominator of the contrast, tau and
    the margin's place are assumed.
    """
    score = masked_mean(logprobs, mask, axis=-1)
    present = lengths(mask) > 0
    positive = present & (rewards > positive_threshold)
    negative = present & ~(rewards > positive_threshold)
    wins = groups.group_size(group_ids, positive, score.dtype)
    both = (wins > 0) & (groups.group_size(group_ids, negative) > 0)
    used = positive & both
    against = groups.group_logsumexp(score / tau, group_ids, negative)
    gap = against - (score - margin) / tau
    term = jnp.where(used, jax.nn.softplus(jnp.where(used, gap, 0.0)), 0.0)
    usable = jnp.sum(groups.first_in_group(group_ids) & both).astype(score.dtype)
    loss = jnp.sum(term / jnp.maximum(wins, 1)) / jnp.maximum(usable, 1)
    chosen = used.astype(term.dtype)
    metrics = {
        "contrast_probability": masked_mean(jnp.exp(-jax.lax.stop_gradient(term)), chosen),
        "usable_group_fraction": usable / groups.number_of_groups(group_ids, term.dtype),
    }
    return loss, metrics
