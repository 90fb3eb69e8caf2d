"""Exporting a run: what transformers makes of the directory is what the run itself samples."""

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers

import research
from launch.export import export
from models import checkpoints, override, preset
from models.tokenizers import HFTokenizer
from models.tree import flatten
from research.config import ConfigError
from research.loop import opened, run
from tests.models.small import enlarged

MODEL = override(preset("nano"), vocab_size=259, num_layers=2, max_length=64)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
NEW_TOKENS = 6
PROMPTS = ["3+4=", "12+9=", "naïve 東"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face directory of a random llama with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("base")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[2],
        pad_token=special[0],
        additional_special_tokens=special[1:2],
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    checkpoints.save_hf(path, MODEL, enlarged(MODEL), HFTokenizer(path))
    return path


def settings(base, workdir, **changes):
    fields = {
        "model": str(base),
        "task.max_operand": 9,
        "workdir": str(workdir),
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "rewards": {"length": {"target": 3}},
        "sampling.max_prompt_tokens": 120,
        "sampling.max_new_tokens": NEW_TOKENS,
        "model_fields": {"max_length": 128},
        "lora.rank": 2,
        "optimizer.learning_rate": 0.3,
        "warmup.steps": 2,
        "warmup.batch_size": 8,
        "evaluation.prompts": 0,
        "checkpoint.every": 0,
        "devices": 1,
    }
    return research.build("grpo", overrides={**fields, **changes})


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory):
    """(config of a run, the directory its policy was exported to)."""
    path = tmp_path_factory.mktemp("exported")
    config = settings(base, path / "run")
    run(config, log=lambda line: None)
    export(config, path / "hf", log=lambda line: None)
    return config, path / "hf"


def test_transformers_continues_as_the_run_does(exported):
    config, path = exported
    with opened(config, log=lambda line: None) as trainer:
        rendered, ours = trainer.complete(PROMPTS, system="Add.", temperature=0.0)
        with pytest.raises(ValueError, match="exceed the model's context of 128 tokens"):
            trainer.complete(["1+" * 70 + "1="])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    for text, (expected,) in zip(rendered, ours, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True) == expected


def test_adapters_are_merged_into_what_they_trained(base, exported):
    before, after = (flatten(checkpoints.load_hf(path)[1]) for path in (base, exported[1]))
    assert before.keys() == after.keys()
    for name, leaf in after.items():
        moved = np.abs(np.asarray(leaf) - np.asarray(before[name])).max()
        assert (moved > 1e-3) == name.startswith("layers/block/attention/"), (name, moved)


def test_a_directory_without_a_run_is_refused(base, tmp_path):
    with pytest.raises(ConfigError, match="No run in workdir"):
        export(settings(base, tmp_path / "none"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_of_characters_exports_its_model_alone(tmp_path):
    config = settings("nano", tmp_path / "run", **{"lora.rank": 0, "model_fields": {}})
    result = run(config, log=lambda line: None)
    lines = []
    export(config, tmp_path / "hf", log=lines.append)
    assert "without a tokenizer" in lines[0]
    found = checkpoints.load_hf(tmp_path / "hf")[1]
    jax.tree.map(np.testing.assert_array_equal, found, result.params)
