"""ESR: on-policy distillation on the first tokens of each rollout."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.distillation.opd_full import opd_full_tokens
from losses.ops.masked import masked_mean


def esr_mean(divergence, mask, *, prefix=128):
    """Mean divergence over each row's first `prefix` valid tokens."""
    seen = jnp.cumsum(mask > 0, axis=-1)
    kept = mask * (seen <= prefix)
    loss = masked_mean(divergence, kept)
    return loss, {
        "teacher_kl": jax.lax.stop_gradient(loss),
        "kept_fraction": masked_mean(kept, mask),
    }


@paper(
    "esr",
    kind="objective",
    base="opd",
    title="Less is More: Early Stopping Rollout for On-Policy Distillation",
    arxiv="2605.27028",
    year=2026,
    split=(opd_full_tokens, esr_mean),
    metric="kept_fraction",
)
def esr_loss(logits, teacher_logits, mask, *, prefix=128):
    """Reverse KL to the teacher on a prefix: late tokens put it where it would never be.

        keep_it = m_it [ sum_{u <= t} m_iu <= prefix ]
        loss    = sum_it keep_it KL(student || teacher) / sum_it keep_it

    Only the policy's own tokens use up the prefix. The sampler should stop there as well
    (max_new_tokens = prefix), which is where the time is saved; the cut is repeated here so that
    longer rollouts can be compared.

    Args:
      logits, teacher_logits: [B,T,V].
      mask: [B,T].
      prefix: valid tokens kept per row.

    Returns:
      (loss, metrics).

    Reference: arXiv 2605.27028, read in summaries: direction, token mean and cut are assumptions.
    """
    return esr_mean(mask=mask, prefix=prefix, **opd_full_tokens(logits, teacher_logits))
