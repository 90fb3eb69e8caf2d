"""Tokens weighted, or selected, by how diffuse their attention is."""

import jax
import jax.numpy as jnp

from losses.arrays import Tokens
from losses.catalogue import nearest, paper
from losses.ops.masked import masked_mean, select
from losses.ops.order import share, top
from losses.ops.pools import rows_standardised

SUBSETS = ("anchor", "explorer", "random")


@paper(
    "attention-entropy-anchors",
    kind="credit",
    base="grpo",
    title="Not All Tokens Learn Alike: Attention Entropy Reveals Heterogeneous Signals in RL "
    "Reasoning",
    arxiv="2605.07660",
    year=2026,
)
def attention_entropy_advantage(
    advantages,
    attention_entropy: Tokens,
    context_lengths: Tokens,
    mask,
    *,
    kappa_start=1.0,
    kappa_end=-0.5,
    progress=0.0,
):
    """Favours tokens of focused attention early in training, of diffuse attention late, [B,T].

        u_it  = attention_entropy_it / log(max(context_lengths_it, 2))
        z_it  = clip( (u_it - mean_i u) / (std_i u + 1e-8), -2, 2 )      population std, per row
        kappa = kappa_start + (kappa_end - kappa_start) clip(progress, 0, 1)
        w_it  = exp(-kappa z_it), rescaled to mean 1 over the row's valid tokens
        out   = m A w

    A row whose u spread by no more than 1e-6 (one token included): w = 1.

    Args:
      advantages, mask: [B,T].
      attention_entropy: [B,T] nats, of the token's attention row, averaged over heads and layers.
      context_lengths: [B,T] positions the token could attend to, prompt included.
      kappa_start, kappa_end: sharpness at the ends of training; positive favours anchors.
      progress: share of training done; a number that may be traced.

    Returns:
      advantages [B,T], constant.

    Reference: arXiv 2605.07660, from the abstract; the weighting after u is an assumption that
    realises its "dynamic, entropy-aware, soft" with anchors first.
    """
    u = normalised_attention_entropy(attention_entropy, context_lengths, mask)
    z = jnp.clip(rows_standardised(u, mask, eps=1e-8), -2.0, 2.0)
    kappa = kappa_start + (kappa_end - kappa_start) * jnp.clip(progress, 0.0, 1.0)
    raw = jnp.exp(-kappa * z)  # exactly 1 where z is 0, so flat rows keep their advantage
    mean = jnp.where(jnp.any(mask > 0, axis=-1), masked_mean(raw, mask, axis=-1), 1.0)
    return select(advantages * raw / mean[:, None], mask)


def normalised_attention_entropy(attention_entropy, context_lengths, mask):
    """attention_entropy over its largest possible value, log(context length); 0 where masked."""
    longest = jnp.log(jnp.maximum(select(context_lengths, mask, 2.0), 2.0))
    return select(attention_entropy, mask) / longest


def attention_entropy_subset(
    attention_entropy, context_lengths, mask, *, ratio=0.2, which="anchor", key=None
):
    """0/1 selection [B,T] of ceil(ratio n) of each response's n valid tokens.

    Multiply the mask with it: the loss then divides by the number of selected tokens.

    Args:
      attention_entropy, context_lengths, mask: [B,T], as for `attention_entropy_advantage`.
      ratio: share of the tokens.
      which: "anchor" (smallest u), "explorer" (largest u) or "random" (uniform, no replacement);
        ties go to the earlier token.
      key: a jax random key, for "random" only.

    Raises:
      ValueError: unknown subset, or "random" without a key.
    """
    mask = jnp.asarray(mask, jnp.result_type(float))
    if which == "random":
        if key is None:
            raise ValueError("which='random' needs key, a jax random key.")
        score = jax.random.uniform(key, mask.shape)
    elif which in SUBSETS:
        u = normalised_attention_entropy(
            jnp.asarray(attention_entropy, mask.dtype),
            jnp.asarray(context_lengths, mask.dtype),
            mask,
        )
        score = -u if which == "anchor" else u
    else:
        raise ValueError(
            f"Unknown subset {which!r}.{nearest(which, SUBSETS)} One of {', '.join(SUBSETS)}."
        )
    n = jnp.sum(mask > 0, axis=-1, keepdims=True)
    return top(score, mask, share(ratio, n))
