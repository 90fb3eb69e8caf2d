"""A model by name: a preset from scratch, or a local Hugging Face directory."""

import pathlib

import jax
import numpy as np

from models.checkpoints import load_hf
from models.config import PRESETS, ModelConfig, preset, unknown_name
from models.tokenizers import CharTokenizer, HFTokenizer, SentencePieceTokenizer
from models.transformer import init


def is_directory(name: str) -> bool:
    """Whether a model's name is a path rather than a preset."""
    return name not in PRESETS and pathlib.Path(name).is_dir()


def load(name: str, tokenizer, *, seed: int, mesh=None, **fields) -> tuple[ModelConfig, dict]:
    """Returns a model's configuration and parameters.

    Args:
      name: a preset of models.config, initialised from `seed` with the tokenizer's vocabulary, or a
        Hugging Face directory.
      tokenizer: the tokenizer the model is to be used with.
      seed: of the initialisation.
      mesh: device mesh to place the parameters of a directory on.
      **fields: fields of the configuration to replace.

    Raises:
      ValueError: neither a preset nor a directory, or a vocabulary smaller than the tokenizer's.
    """
    if name in PRESETS:
        fields.setdefault("vocab_size", tokenizer.vocab_size)
        config = preset(name, **fields)
        params = jax.jit(lambda key: init(config, key))(jax.random.key(seed))
    elif is_directory(name):
        dtype = fields.pop("dtype", "float32")
        config, params = load_hf(name, dtype, mesh, jax.random.key(seed), **fields)
    else:
        raise ValueError(
            unknown_name("model", name, tuple(PRESETS)) + ", or a local Hugging Face directory"
        )
    if config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but model {name!r} only "
            f"{config.vocab_size}: they do not belong together"
        )
    return config, params


def load_tokenizer(model: str, tokenizer: str, alphabet: str):
    """Returns the tokenizer of a run.

    Args:
      model: a preset or a Hugging Face directory, which brings its own tokenizer.
      tokenizer: a SentencePiece .model file or a Hugging Face directory to use instead, or "".
      alphabet: the characters of the task, for a preset without a tokenizer of its own.

    Raises:
      ValueError: `tokenizer` is neither of the two.
    """
    if tokenizer.endswith(".model"):
        return SentencePieceTokenizer(tokenizer)
    if tokenizer:
        if not pathlib.Path(tokenizer).is_dir():
            raise ValueError(
                f"tokenizer {tokenizer!r}: expected a SentencePiece .model file or a Hugging Face "
                "directory"
            )
        return HFTokenizer(tokenizer)
    return HFTokenizer(model) if is_directory(model) else CharTokenizer(alphabet)


def count(params) -> int:
    """Number of parameters in a tree."""
    return int(sum(np.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params)))
