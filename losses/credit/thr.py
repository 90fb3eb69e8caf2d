"""THR: tokens steered by their first-order effect on the likelihood of the correct responses."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import lengths, masked_mean, select


@paper(
    "thr",
    kind="credit",
    base="grpo",
    title="Token Hidden Reward: Steering Exploration-Exploitation in Group Relative Deep "
    "Reinforcement Learning",
    arxiv="2510.03669",
    year=2025,
)
def thr_advantage(
    advantages,
    rewards,
    old_logits,
    hidden: Float[Array, "B T D"],
    tokens,
    group_ids,
    mask,
    *,
    p=0.1,
    tau_scale=1.0,
    drop_small=True,
    correct_threshold=0.5,
):
    """Advantage scaled by 1 + p sign(THR), and dropped where |THR| is small.

        g_it = onehot(token) - softmax(old_logits_it),  M = sum over Pos of the group of g_it h_it^T
        s_jt = g_jt^T M h_jt,   THR_jt = s_jt if j in Pos, -s_jt if j in Neg
        tau  = tau_scale min_{i in Pos} mean_t s_it
        out  = A [ |THR| > tau or not drop_small ] ( 1 + p sign(THR) )

    Pos are the responses with reward > correct_threshold, Neg the others; rows without a valid
    token are in neither. A group that lacks either is left as it is. A token of Pos meets itself.

    Args:
      advantages, mask: [B,T].
      rewards, group_ids: [B].
      old_logits: [B,T,V].
      hidden: [B,T,D] input of the output head under the old policy.
      tokens: [B,T] int.
      p: > 0 strengthens tokens that raise the likelihood of correct responses (exploitation),
        < 0 the ones that leave room for alternatives.
      tau_scale: of the threshold.
      drop_small: whether tokens of little influence are dropped.
      correct_threshold: reward above which a response is correct.

    Returns:
      advantages [B,T].

    Reference: arXiv 2510.03669, from reviews and the authors' earlier method: the factor
    1 + p sign(THR), p and tau are inferred. Memory is [B,V,D] for M.
    """
    usable = lengths(mask) > 0
    positive = usable & (rewards > correct_threshold)
    negative = usable & ~positive
    one_hot = jax.nn.one_hot(tokens, old_logits.shape[-1], dtype=old_logits.dtype)
    g = select(one_hot - jax.nn.softmax(old_logits, axis=-1), mask[..., None])
    h = select(hidden, mask[..., None])
    of_row = jnp.einsum("btv,btd->bvd", g, h, precision="highest")
    summed = groups.same_group(group_ids, positive).astype(h.dtype)
    of_group = jnp.einsum("bc,cvd->bvd", summed, of_row, precision="highest")
    s = jnp.einsum("btv,bvd,btd->bt", g, of_group, h, precision="highest")

    score = jnp.where(positive[:, None], s, -s)
    tau = tau_scale * groups.group_min(masked_mean(s, mask, -1), group_ids, positive)
    kept = jnp.abs(score) > tau[:, None] if drop_small else True
    reshaped = advantages * kept * (1 + p * jnp.sign(score))
    mixed = (groups.group_size(group_ids, positive) > 0) & (
        groups.group_size(group_ids, negative) > 0
    )
    return select(jnp.where(mixed[:, None], reshaped, advantages), mask)
