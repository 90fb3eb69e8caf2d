"""Small random `transformers` models of every family, and ragged batches for them."""

import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

from models.checkpoints import FAMILIES

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

VOCAB, COLUMNS = 67, 12
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.75,
    "rope_theta": 1e4,
}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 4}
LOCAL_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]


def rope(theta=1e4, **scaling):
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **scaling}}


# Each case: the family, and what is particular about it.
CASES = {
    "llama2": ("llama", {}),
    "llama3": ("llama", {"tie_word_embeddings": False, **rope(5e5, **LLAMA3)}),
    "llama-biased": ("llama", {"attention_bias": True}),
    "llama-linear": ("llama", rope(rope_type="linear", factor=2.0)),
    "llama-dynamic": (
        "llama",
        {**rope(rope_type="dynamic", factor=2.0), "max_position_embeddings": 8},
    ),
    "llama-yarn": ("llama", rope(**YARN)),
    "smollm2": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    # Caps small enough to bend these small logits.
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 0.2}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "layer_types": PATTERN, "rope_parameters": LOCAL_GLOBAL},
    ),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phi4-mini": ("phi3", {"tie_word_embeddings": True, "rope_parameters": LONG}),
}


def build(case: str):
    """Returns the case's torch model with random weights, biases and norms."""
    family, particular = CASES[case]
    fields = {**BASE, **particular}
    if case == "phi4-mini":
        fields["original_max_position_embeddings"] = LONG["original_max_position_embeddings"]
    config = transformers.AutoConfig.for_model(family, **fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family])(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # Norm scales and biases start constant; make them count.
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" not in name and "lm_head" not in name:
                parameter.mul_(5.0)
    return model


def _batch(pads):
    """Tokens and positions [B, COLUMNS] int32, left-padded by `pads`."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, VOCAB, (len(pads), COLUMNS)).astype(np.int32)
    positions = np.maximum(np.arange(COLUMNS) - np.asarray(pads)[:, None], -1).astype(np.int32)
    return np.where(positions < 0, 0, tokens), positions


TOKENS, POSITIONS = _batch(pads=(0, 3, 5))
LIVE = POSITIONS >= 0


def torch_logits(model, tokens, positions):
    """Logits [B, S, V] of the torch model on a left-padded batch."""
    return model(
        input_ids=torch.tensor(tokens).long(),
        attention_mask=torch.tensor(positions >= 0).long(),
        position_ids=torch.tensor(np.maximum(positions, 0)).long(),
    ).logits
