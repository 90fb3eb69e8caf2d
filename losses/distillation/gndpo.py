"""GNDPO: the teacher gap clamped and whitened over all tokens of the batch."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import flat, select, whiten
from losses.ops.ratios import log_ratio


@paper(
    "gndpo",
    kind="advantage",
    base="ppo",
    title="Globally Normalized Distillation Policy Optimization (GNDPO)",
    year=2026,
)
def gndpo_advantage(old_logprobs, teacher_logprobs, mask, *, clip=5.0, eps=1e-8):
    """The clamped log-ratio to the teacher as a standard score, [B,T].

        d_t   = clip( teacher_logprobs_t - old_logprobs_t, -clip, clip )
        value = m (d - mean d) / sqrt( var d + eps )          over every valid token, var with n - 1

    Relative: about half of the tokens are pushed down even where the teacher likes all of them
    better. Fewer than two tokens, or equal gaps: 0.

    Args:
      old_logprobs, teacher_logprobs, mask: [B,T]; the statistics are those of the whole batch.
      clip: bound on the gap, before the statistics; None: none.
      eps: added to the variance.

    Returns:
      advantages [B,T], constant.

    Reference: OPPO-Mente-Lab/GNDPO.
    """
    gap = log_ratio(teacher_logprobs, old_logprobs, mask)
    if clip is not None:
        gap = jnp.clip(gap, -clip, clip)
    return select(jnp.where(flat(gap, mask), 0.0, whiten(gap, mask, ddof=1, eps=eps)), mask)
