"""GD2PO: responses on which reward components pull apart are dropped."""

import jax
import jax.numpy as jnp

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.masked import flat, lengths, rows_to_tokens, select
from losses.ops.masked import whiten as whitened
from losses.ops.options import check_option

SIGNAL = 1e-8
"""Signals no larger than this count as none."""


@paper(
    "gd2po",
    kind="advantage",
    base="dapo",
    title="GD2PO: Mitigating Multi-Reward Conflicts via Group-Dynamic reward-Decoupled Policy "
    "Optimization",
    arxiv="2606.16771",
    year=2026,
)
def gd2po_advantage(reward_components, group_ids, mask, *, variant="hard", tau=0.8, whiten=True):
    """Sum of group-normalised components over responses without conflict, [B,T].

        N_br   = (x_br - group mean) / (group std + 1e-6)          of one component
        S_br   = N_br |y_b|
        conflict_b: some S_br > 1e-8 and some S_br < -1e-8
        "hard" drops conflicts;  "snr" those with |sum_r S_br| / (sum_r |S_br| + 1e-8) < tau
        X_bt   = m_bt keep_b (kept share of the group) sum_r N_br
        A      = (X - mean) / sqrt(var + 1e-8) over the kept tokens         var unbiased

    A component equal in the whole group gives N = 0; a group of one x / (1 + 1e-6). Responses
    without tokens are members of their group. Fewer than two kept tokens, or X all equal: 0.

    Args:
      reward_components: [B,R].
      group_ids: [B] int.
      mask: [B,T].
      variant: "hard" or "snr".
      tau: threshold of "snr", clipped to [0, 1].
      whiten: False returns X.

    Returns:
      advantages [B,T], constant; exactly 0 on dropped responses.

    Raises:
      ValueError: unknown variant.

    Reference: arXiv 2606.16771; Qwen-Applications/GD2PO.
    """
    check_option("variant", variant, ("hard", "snr"))
    normalise = jax.vmap(groups.standardised_or_raw, in_axes=(1, None), out_axes=1)
    n = normalise(reward_components, group_ids)
    signal = n * lengths(mask)[:, None]
    dropped = jnp.any(signal > SIGNAL, axis=1) & jnp.any(signal < -SIGNAL, axis=1)
    if variant == "snr":
        agreement = jnp.sum(signal, axis=1) / (jnp.sum(jnp.abs(signal), axis=1) + SIGNAL)
        dropped = dropped & (jnp.abs(agreement) < min(max(tau, 0.0), 1.0))
    keep = jnp.where(dropped, 0.0, 1.0).astype(mask.dtype)
    kept_mask = mask * keep[:, None]
    x = rows_to_tokens(groups.group_mean(keep, group_ids) * jnp.sum(n, axis=1), kept_mask)
    if not whiten:
        return x
    return select(jnp.where(flat(x, kept_mask), 0.0, whitened(x, kept_mask, eps=1e-8)), kept_mask)
