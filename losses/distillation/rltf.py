"""RLTF: text feedback, distilled into the first attempt and predicted by the policy."""

import jax
from jaxtyping import Array, Float

from losses.arrays import Rows, Tokens
from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import aggregate, masked_mean, rows_to_tokens
from losses.ops.options import check_option
from losses.ops.ratios import WIDE_BOUND, token_ratio


@paper(
    "rltf",
    kind="objective",
    base="grpo",
    title="Expanding the Capabilities of Reinforcement Learning via Text Feedback",
    arxiv="2602.02482",
    year=2026,
    gradients=("revision_logprobs", "critique_logprobs"),
    when={"critique_logprobs": "fm_coef", "critique_mask": "fm_coef"},
    metric="self_distillation_loss",
)
def rltf_loss(
    revision_logprobs: Tokens,
    revision_old_logprobs: Tokens,
    revision_mask: Tokens,
    revision_rewards: Rows,
    first_rewards: Rows,
    group_ids,
    critique_logprobs: Float[Array, "B C"] = None,
    critique_mask: Float[Array, "B C"] = None,
    *,
    sd_coef=0.1,
    fm_coef=0.1,
    logprob_floor=-5.0,
    baseline="first",
):
    """The plain prompt learns the revised answer (SD), the policy learns the critique (FM).

        A_i  = revision_rewards_i - group mean of first_rewards      ("second": of the revisions)
        ok   = [ revision_old_logprobs >= logprob_floor ]
        SD   = - sd_coef (1/B) sum_it ok exp(revision_logprobs - revision_old_logprobs) A_i
        FM   = - fm_coef (1/B) sum_it critique_logprobs
        loss = SD + FM

    Both log-probabilities of the revision are given the plain prompt, although it was sampled after
    the feedback: there is no weight between the two, and no clip. Empty rows count in the baseline
    and in B.

    Args:
      revision_logprobs: [B,T] of the revision given the plain prompt; differentiable.
      revision_old_logprobs: [B,T] the same at the start of the update.
      revision_mask: [B,T]; empty where the first attempt ended the episode.
      revision_rewards, first_rewards: [B].
      group_ids: [B].
      critique_logprobs: [B,C] of the critique given a request for it; differentiable. Not read, and
        may be None, when fm_coef = 0; likewise `critique_mask` [B,C].
      sd_coef, fm_coef: weights; fm_coef = 0 is RLTF-SD, sd_coef = 0 RLTF-FM.
      logprob_floor: tokens below it under the old policy are left out, nats.
      baseline: "first" or "second".

    Returns:
      (loss, metrics).

    Raises:
      ValueError: unknown baseline.

    Reference: arXiv 2602.02482 and the authors' code. It is added to the policy-gradient loss of
    the two turns; that fm_coef multiplies a token sum is assumed.
    """
    check_option("baseline", baseline, ("first", "second"))
    compared = first_rewards if baseline == "first" else revision_rewards
    advantages = revision_rewards - groups.group_mean(compared, group_ids)
    kept = revision_mask * (revision_old_logprobs >= logprob_floor)
    ratio = token_ratio(revision_logprobs, revision_old_logprobs, kept, WIDE_BOUND)
    loss = -sd_coef * aggregate(ratio * rows_to_tokens(advantages, kept), kept, "sequence_sum")
    metrics = {
        "self_distillation_loss": jax.lax.stop_gradient(loss),
        "kept_fraction": masked_mean(kept, revision_mask),
    }
    if fm_coef:
        feedback = -fm_coef * aggregate(critique_logprobs, critique_mask, "sequence_sum")
        metrics["feedback_loss"] = jax.lax.stop_gradient(feedback)
        loss = loss + feedback
    return loss, metrics
