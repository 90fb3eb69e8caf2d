"""Every family against `transformers`: logits, gradients, cached and greedy decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models import Transformer, init_cache, logits
from models.checkpoints import tensor_names
from models.sampling import sample
from models.tree import flatten
from tests.models.families import CASES, COLUMNS, LIVE, POSITIONS, TOKENS, torch_logits
from tests.models.small import run

# These differ from another Llama in their rotary frequencies or biases alone: logits tell.
VARIANTS = ("llama2", "llama-biased", "llama-linear", "llama-dynamic", "llama-yarn")


def forward(config, params):
    hidden = Transformer(config).apply({"params": params}, TOKENS, POSITIONS).hidden
    return logits(params, config, hidden)


def assert_logits_match(scores, expected):
    scores, expected = np.asarray(scores), expected.detach().numpy()
    np.testing.assert_allclose(scores[LIVE], expected[LIVE], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", VARIANTS)
def test_logits(case, checkpoint):
    model, _, config, params = checkpoint(case)
    hidden = run(config, params, TOKENS, POSITIONS).hidden
    assert_logits_match(logits(params, config, hidden), torch_logits(model, TOKENS, POSITIONS))


@pytest.mark.parametrize("case", sorted(set(CASES) - set(VARIANTS)))
def test_logits_gradients_and_cached_decoding(case, checkpoint):
    model, _, config, params = checkpoint(case)
    expected = torch_logits(model, TOKENS, POSITIONS)

    def mean_log_prob(params):
        scores = forward(config, params)
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(scores[:, :-1]), TOKENS[:, 1:, None], axis=-1
        )[..., 0]
        live = LIVE[:, :-1]
        return jnp.sum(picked * live) / live.sum(), scores

    (_, scores), gradient = jax.jit(jax.value_and_grad(mean_log_prob, has_aux=True))(params)
    assert_logits_match(scores, expected)

    picked = expected[:, :-1].log_softmax(-1).gather(-1, torch.tensor(TOKENS[:, 1:, None]).long())
    live = torch.tensor(LIVE[:, :-1])
    model.zero_grad()
    ((picked[..., 0] * live).sum() / live.sum()).backward()
    theirs = torch_gradients(model, config)
    for path, ours in flatten(gradient).items():
        wanted = theirs[path]
        scale = np.abs(wanted).max()
        assert scale > 0, path
        np.testing.assert_allclose(np.asarray(ours), wanted, atol=1e-3 * scale, err_msg=path)

    # One column at a time over ragged rows, past the sliding windows of 4 and 5.
    cache, hidden = init_cache(config, len(TOKENS), COLUMNS), []
    for s in range(COLUMNS):
        out = run(config, params, TOKENS[:, s : s + 1], POSITIONS[:, s : s + 1], cache=cache)
        cache = out.cache
        hidden.append(out.hidden)
    decoded = logits(params, config, jnp.concatenate(hidden, axis=1))
    np.testing.assert_allclose(
        np.asarray(decoded)[LIVE], np.asarray(scores)[LIVE], atol=1e-4, rtol=0
    )


def torch_gradients(model, config):
    """The torch model's gradients under our names and in our layout."""
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    found = {}
    for path, (name, row) in tensor_names(config).items():
        if "/moe/" in path and "router" not in path:
            # In memory, transformers fuses the experts that it stores apart.
            fused = (
                ".mlp.experts.down_proj" if path.endswith("down") else ".mlp.experts.gate_up_proj"
            )
            stack = np.stack(
                [gradients[f"model.layers.{i}{fused}"] for i in range(config.num_layers)]
            )
            half = {"gate": slice(0, config.expert_size), "up": slice(config.expert_size, None)}
            stack = stack[:, :, half.get(path.split("/")[-1], slice(None))]
            found[path] = np.swapaxes(stack, -1, -2)
            continue
        name = name.replace("block_sparse_moe", "mlp")
        if name.format(layer=0) not in gradients:
            continue
        count = config.num_layers if "{layer}" in name else 1
        stack = np.stack([gradients[name.format(layer=i)] for i in range(count)])
        if path.endswith("kernel"):
            stack = np.swapaxes(stack, -1, -2)
        found[path] = stack if "{layer}" in name else stack[0]
        if config.family == "phi3" and path.split("/")[-2] in ("q", "k", "v", "gate", "up"):
            sizes = {
                "q": config.num_heads * config.head_dim,
                "gate": config.mlp_size,
                "up": config.mlp_size,
            }
            width = sizes.get(path.split("/")[-2], config.num_kv_heads * config.head_dim)
            found[path] = found[path][..., row : row + width]
    return found


@pytest.mark.parametrize(
    "case",
    ["llama3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3"],
)
def test_greedy_generation(case, checkpoint):
    model, _, config, params = checkpoint(case)
    keys = jax.random.split(jax.random.key(0), len(TOKENS))
    ours = sample(
        config, params, TOKENS, POSITIONS, keys, group_size=1, max_new_tokens=32, temperature=0.0
    )
    model.generation_config.eos_token_id = None  # Neither side stops early.
    theirs = model.generate(
        input_ids=torch.tensor(TOKENS).long(),
        attention_mask=torch.tensor(LIVE).long(),
        max_new_tokens=32,
        do_sample=False,
    )[:, COLUMNS:].numpy()
    np.testing.assert_array_equal(ours.tokens, theirs)
    assert len(np.unique(theirs)) > 3
