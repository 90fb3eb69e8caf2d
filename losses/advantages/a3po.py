"""A3PO: more weight on unlikely tokens of right answers and on likely tokens of wrong ones."""

import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops.masked import select
from losses.ops.order import rank, share_down


@paper(
    "a3po",
    kind="credit",
    base="dapo",
    title="Rethinking Sample Polarity in Reinforcement Learning with Verifiable Rewards",
    arxiv="2512.21625",
    year=2025,
)
def a3po_credit(
    advantages,
    old_logprobs,
    mask,
    rewards,
    *,
    ratio=0.2,
    pos_scale=2.0,
    neg_scale=2.0,
    pos_decay=0.005,
    neg_decay=0.005,
    step=0,
):
    """Advantages times a decaying scale on the tokens that matter for exploration, [B,T].

        n_i = min( L_i, max(1, floor(ratio L_i)) )                 L_i valid tokens of the row
        right (reward 1): the n_i tokens of lowest old_logprobs    times max(1, scale - decay step)
        wrong (reward 0): the n_i tokens of highest old_logprobs   likewise, scale and decay its own

    Of equal log-probabilities the earlier position counts as the lower. Rows of any other reward
    and all other tokens stay as they are. Polarity is the reward's, not the advantage's sign.

    Args:
      advantages, old_logprobs, mask: [B,T].
      rewards: [B] 1 or 0.
      ratio: share of a row's tokens to scale.
      pos_scale, neg_scale: scales at step 0.
      pos_decay, neg_decay: loss of scale per step.
      step: global step of the training, a number or a traced scalar.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2512.21625. The linear decay and its rates are assumed: the authors' code holds
    fixed scales only.
    """
    live = jnp.sum(mask > 0, axis=1, keepdims=True).astype(mask.dtype)
    n = jnp.minimum(live, jnp.maximum(share_down(ratio, live), 1))
    place = rank(-old_logprobs, mask)
    right, wrong = (rewards == 1)[:, None], (rewards == 0)[:, None]
    raised = jnp.where(right & (place < n), jnp.maximum(1.0, pos_scale - pos_decay * step), 1.0)
    lowered = jnp.where(
        wrong & (place >= live - n), jnp.maximum(1.0, neg_scale - neg_decay * step), 1.0
    )
    return select(advantages * raised * lowered, mask)
