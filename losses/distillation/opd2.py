"""OPD2: the reward of a token is what reasoning training changed in the teacher."""

import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import paper
from losses.ops.ratios import log_ratio


@paper(
    "opd2",
    kind="advantage",
    base="ppo",
    title="On-Policy Delta Distillation",
    arxiv="2607.15161",
    year=2026,
    stages={"regularizers": [("kl_penalty", {"kl_coef": 0.001})]},
)
def opd2_advantage(
    teacher_logprobs, teacher_base_logprobs: Tokens, old_logprobs, mask, *, clip=5.0, anchor=0.0
):
    """Teacher minus the model it was tuned from, optionally anchored to the student.

        d   = clip(teacher_logprobs - teacher_base_logprobs, -clip, clip)
        out = d - anchor (old_logprobs - teacher_base_logprobs)

    anchor = 1 without a bound is plain on-policy distillation, teacher - old. The bound acts on d
    alone. The signal does not vanish at student = teacher: stop early, or anchor.

    Args:
      teacher_logprobs, old_logprobs, mask: [B,T].
      teacher_base_logprobs: [B,T] under the teacher before its reasoning training.
      clip: bound on |d|, nats; None: none.
      anchor: in [0, 1].

    Returns:
      advantages [B,T].

    Reference: arXiv 2607.15161, abstract only: clip, anchor and the KL of its run are assumed.
    """
    delta = log_ratio(teacher_logprobs, teacher_base_logprobs, mask)
    if clip is not None:
        delta = jnp.clip(delta, -clip, clip)
    return delta - anchor * log_ratio(old_logprobs, teacher_base_logprobs, mask)
