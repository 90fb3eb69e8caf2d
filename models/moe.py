"""Sparse mixture-of-experts MLP: top-k routing that can be recorded and replayed."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.layers import Linear, activate, kernel_init


class SparseMLP(nn.Module):
    """y = sum over the k chosen experts e of p_e (act(x G_e) * x U_e) D_e, p = softmax(x R).

    The gate's probabilities are rescaled to sum to one over the chosen where `norm_topk` says so.
    Replayed routes choose the experts; their probabilities are still this router's, so the router
    keeps its gradient (arXiv:2507.18071, section 5.3; arXiv:2510.11370).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x, routes=None):
        """Applies the experts.

        Args:
          x: [B, S, D] normed hidden states.
          routes: [B, S, k] int32 experts to use, or None; entries below 0 are chosen here.

        Returns:
          Output [B, S, D] and the routes used [B, S, k] int32.
        """
        config = self.config
        count, top = config.num_experts, config.experts_per_token
        # Router logits in the compute dtype and softmax in float32, as the published models do.
        scores = Linear(config, count, name="router")(x).astype(jnp.float32)
        probabilities = jax.nn.softmax(scores)
        chosen = jax.lax.top_k(probabilities, top)[1]
        if routes is not None:
            chosen = jnp.where(routes >= 0, routes, chosen)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
        if config.norm_topk:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

        def experts(name, inputs, outputs, residual=False):
            shape = (count, inputs, outputs)
            dtype = jnp.dtype(config.param_dtype)
            kernel = self.param(name, kernel_init(config, residual), shape, dtype)
            return kernel.astype(config.dtype)

        width = config.hidden_size
        gate = experts("gate", width, config.expert_size)
        up = experts("up", width, config.expert_size)
        down = experts("down", config.expert_size, width, residual=True)

        # Token copies sorted by expert make each expert's work one contiguous block.
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
        rows = x.reshape(-1, width)[order // top]
        inner = activate(config, jax.lax.ragged_dot(rows, gate, sizes))
        inner = inner * jax.lax.ragged_dot(rows, up, sizes)
        out = jax.lax.ragged_dot(inner, down, sizes)
        out = jnp.zeros_like(out).at[order].set(out).reshape(*x.shape[:2], top, width)
        out = jnp.sum(out * weights[..., None].astype(out.dtype), axis=-2)
        return out, chosen


def route_change(routes, other, mask):
    """Share of expert choices that differ: mean over live tokens and layers of 1 - |A n B| / k.

    Args:
      routes, other: [L, B, S, k] int32, the experts of each token; order does not matter.
      mask: [B, S], 1 on the tokens to count.

    Returns:
      Scalar float32 in [0, 1]; 0 where nothing is live.
    """
    shared = jnp.mean(jnp.any(routes[..., :, None] == other[..., None, :], axis=-1), axis=-1)
    changed = jnp.mean(1.0 - shared, axis=0)
    return jnp.sum(changed * mask) / jnp.maximum(jnp.sum(mask), 1.0)
