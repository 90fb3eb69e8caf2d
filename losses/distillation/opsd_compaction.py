"""OPSD compaction: self-distillation from a hinted copy, on correct rollouts only."""

import jax

from losses.catalogue import paper
from losses.distillation.opd_full import opd_full_tokens
from losses.ops.masked import masked_mean
from losses.ops.options import check_option

ARMS = ("correct", "incorrect", "all")


def opsd_compaction_mean(divergence, rewards, mask, *, keep="correct"):
    """Mean divergence over the valid tokens of the kept rows."""
    check_option("keep", keep, ARMS)
    right = (rewards > 0)[:, None]
    kept = mask * {"correct": right, "incorrect": ~right, "all": True}[keep]
    loss = masked_mean(divergence, kept)
    return loss, {
        "teacher_kl": jax.lax.stop_gradient(loss),
        "kept_fraction": masked_mean(kept, mask),
    }


@paper(
    "opsd-compaction",
    kind="objective",
    base="opd",
    title="OPSD Compresses What RLVR Teaches: A Post-RL Compaction Stage for Reasoning Models",
    arxiv="2605.06188",
    year=2026,
    split=(opd_full_tokens, opsd_compaction_mean),
    metric="kept_fraction",
)
def opsd_compaction_loss(logits, teacher_logits, rewards, mask, *, keep="correct"):
    """Reverse KL to the teacher over the tokens of the rollouts with the chosen outcome.

        k_i  = 1 if rewards_i > 0 ("correct"),  if rewards_i <= 0 ("incorrect"),  always ("all")
        loss = sum k m KL(student || teacher) / sum k m                     0 if nothing is kept

    Correctness selects the states, it does not set the target.

    Args:
      logits: [B,T,V] of the student.
      teacher_logits: [B,T,V] of the weights at the start of the stage, with a worked solution in
        the prompt.
      rewards: [B], of which the sign counts.
      mask: [B,T].
      keep: "correct", "incorrect" or "all".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown arm.

    Reference: arXiv 2605.06188, from a summary; the token mean is assumed.
    """
    tokens = opd_full_tokens(logits, teacher_logits)
    return opsd_compaction_mean(rewards=rewards, mask=mask, keep=keep, **tokens)
