"""Every test runs on the CPU, with eight emulated devices, compiling each program once."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Most of the suite's time is compilation of programs that run for milliseconds.
FASTER_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FASTER_COMPILATION}".strip()

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
CACHE = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
