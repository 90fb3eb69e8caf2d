"""The transformer's smallest parts: linear map with optional adapter, RMS norm, gated MLP."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.config import ModelConfig

INIT_SCALE = 0.02


def kernel_init(config: ModelConfig, residual: bool = False):
    """Normal(0.02); maps that write to the residual stream are scaled by 1 / sqrt(2 layers).

    The scaling keeps the variance of the residual stream independent of depth at the start
    (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners").
    """
    scale = INIT_SCALE * ((2 * config.num_layers) ** -0.5 if residual else 1.0)
    return nn.initializers.normal(scale)


class Linear(nn.Module):
    """y = x W + b (+ (alpha / rank) x A B where the module is a LoRA target)."""

    config: ModelConfig
    features: int
    bias: bool = False
    residual: bool = False

    @nn.compact
    def __call__(self, x):
        config, inputs = self.config, x.shape[-1]

        def param(name, init, shape):
            return self.param(name, init, shape, jnp.dtype(config.param_dtype)).astype(config.dtype)

        kernel = param("kernel", kernel_init(config, self.residual), (inputs, self.features))
        y = x @ kernel
        if self.bias:
            y = y + param("bias", nn.initializers.zeros, (self.features,))
        if config.lora_rank and self.name in config.lora_targets:
            # A uniform on +-1/sqrt(inputs), B zero: the adapter starts as the identity (LoRA).
            uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
            down = param("lora_a", uniform, (inputs, config.lora_rank))
            up = param("lora_b", nn.initializers.zeros, (config.lora_rank, self.features))
            y = y + (config.lora_alpha / config.lora_rank) * (x @ down @ up)
        return y


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w, in wide_dtype (w + 1 where the config has norm_offset)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        config = self.config
        init = nn.initializers.zeros if config.norm_offset else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],), jnp.dtype(config.param_dtype))
        scale = scale.astype(config.wide_dtype) + (1.0 if config.norm_offset else 0.0)
        x = x.astype(config.wide_dtype)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + config.norm_eps)
        return (x * scale).astype(config.dtype)


def activate(config: ModelConfig, x):
    """The MLP's nonlinearity, elementwise."""
    if config.activation == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=config.activation == "gelu_tanh")


class MLP(nn.Module):
    """y = (act(x W_gate) * x W_up) W_down."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        config = self.config
        gate = Linear(config, config.mlp_size, name="gate")(x)
        up = Linear(config, config.mlp_size, name="up")(x)
        return Linear(config, config.hidden_size, residual=True, name="down")(
            activate(config, gate) * up
        )
