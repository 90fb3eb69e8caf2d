"""Entropy minimisation: responses rewarded for their own certainty, no labels."""

import jax
import jax.numpy as jnp
import optax

from losses.catalogue import paper
from losses.ops import groups
from losses.ops.divergences import entropy_of, kl, log_softmax
from losses.ops.masked import lengths, masked_mean, masked_sum, rows_to_tokens
from losses.ops.options import check_option

_PAPER = {
    "title": "The Unreasonable Effectiveness of Entropy Minimization in LLM Reasoning",
    "arxiv": "2505.15134",
    "year": 2025,
}


@paper("entropy-minimization", kind="advantage", base="grpo", **_PAPER)
def em_rl_advantage(
    old_entropy, old_logprobs, group_ids, mask, *, level="token", length_norm=False
):
    """Leave-one-out advantage of a response's own negative entropy (EM-RL), [B,T].

        level="token"     r_i = - sum_t m_it old_entropy_it
        level="sequence"  r_i =   sum_t m_it old_logprobs_it
        length_norm       r_i <- r_i / |y_i|
        A_it = m_it ( r_i - mean of the other responses' r )        group of one: 0

    Responses without tokens are no members of their group. Needs the KL term of its base, without
    which the policy collapses to short certain text.

    Args:
      old_entropy, old_logprobs: [B,T] of the policy that sampled, nats.
      group_ids: [B] int.
      mask: [B,T].
      level: "token" or "sequence", a one-sample estimate of the response's entropy.
      length_norm: divide by the response's length.

    Returns:
      advantages [B,T], constant.

    Raises:
      ValueError: unknown level.

    Reference: Agarwal et al. 2025, arXiv 2505.15134; rewards after the abstract. Baseline, lack of
    length normalisation and the KL term are assumed.
    """
    check_option("level", level, ("token", "sequence"))
    reduce = masked_mean if length_norm else masked_sum
    certainty = reduce(old_logprobs if level == "sequence" else -old_entropy, mask, axis=1)
    valid = lengths(mask) > 0
    flat = groups.all_equal(certainty, group_ids, valid)  # a group of one included
    value = certainty - groups.leave_one_out_mean(certainty, group_ids, valid)
    return rows_to_tokens(jnp.where(flat, 0.0, value), mask)


@paper("entropy-minimization", kind="objective", companion=True, metric="entropy", **_PAPER)
def em_ft_loss(entropy, mask):
    """Mean token entropy of the model's own text (EM-FT): sum m entropy / sum m.

    Args:
      entropy: [B,T] of the current policy, nats, differentiable.
      mask: [B,T].

    Returns:
      (loss, metrics).
    """
    loss = masked_mean(entropy, mask)
    return loss, {"entropy": jax.lax.stop_gradient(loss)}


def em_inf_logits(logits, *, steps=5, lr=0.1, threshold=0.3, kl_weight=0.001):
    """Logits made more certain at decoding time (EM-INF).

        up to `steps` times, while H(z) >= threshold:
            z <- z - Adam step of rate lr on  H(z) + kl_weight KL(logits || z)

    Every position has its own fresh Adam state (0.9, 0.999, 1e-8). The check comes first, so that
    confident positions are untouched.

    Args:
      logits: [...,V]; leading axes are positions on their own.
      steps: rounds at most.
      lr: rate of Adam, in logits.
      threshold: entropy below which a position is left alone, nats.
      kl_weight: weight of the KL to the original distribution.

    Returns:
      logits of the same shape, to sample from.
    """
    original = log_softmax(logits)
    adam = optax.adam(lr, b1=0.9, b2=0.999, eps=1e-8)

    def uncertainty(z):
        log_p = log_softmax(z)
        entropy = entropy_of(log_p)
        # Positions do not share terms: the gradient of the sum is each position's own.
        return jnp.sum(entropy + kl_weight * kl(original, log_p)), entropy

    def round_(carry, _):
        z, state = carry
        gradient, entropy = jax.grad(uncertainty, has_aux=True)(z)
        step, state = adam.update(gradient, state)
        return (jnp.where((entropy < threshold)[..., None], z, z + step), state), None

    return jax.lax.scan(round_, (logits, adam.init(logits)), length=steps)[0][0]
