"""Writes a run's policy as a Hugging Face directory, adapters merged, with its tokenizer.

python -m launch.export --from_run=RUN --workdir=RUN --out=DIR

`transformers` loads the directory, and so does --config.model=DIR. A run with an average of the
parameters (config.ema) exports the average, which is what its evaluations measured.
"""

from pathlib import Path

from absl import flags as absl_flags

from launch import flags
from models import checkpoints, lora
from models.tokenizers import HFTokenizer
from research.config import ConfigError

OUT = absl_flags.DEFINE_string("out", None, "Directory to write, created if missing.")


def export(config, out: str, log=print):
    """Writes the policy of a run's last checkpoint.

    Args:
      config: of the run; its `workdir` holds the run.
      out: the directory. The tokenizer of a model that came from a Hugging Face directory is
        written too; characters and SentencePiece have no form that `transformers` reads.
      log: receives one line on what was written.

    Raises:
      ConfigError: the work directory holds no run, or one without a checkpoint.
      ValueError: a model that its family's config cannot express.
    """
    from research.loop import opened

    if not (Path(config.workdir) / "config.json").is_file():
        raise ConfigError(
            f"No run in workdir={config.workdir!r}: expected the work directory of a run, "
            "e.g. --from_run=RUN --workdir=RUN."
        )
    with opened(config, log=lambda line: None) as trainer:
        if not trainer.step:
            raise ConfigError(f"The run in {config.workdir} has no checkpoint yet.")
        params = lora.combine(*map(trainer.layout.fetch, trainer.served))
        checkpoints.save_hf(out, trainer.model, params, trainer.tokenizer)
        whole = isinstance(trainer.tokenizer, HFTokenizer)
        if whole:
            trainer.tokenizer.save(out)
        log(
            f"wrote the policy after {trainer.step} steps of {config.workdir} to {out}, "
            + ("with its tokenizer" if whole else "without a tokenizer: it is not Hugging Face's")
        )


if __name__ == "__main__":
    absl_flags.mark_flag_as_required("out")
    flags.main(lambda config: export(config, OUT.value), __doc__)
