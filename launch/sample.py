"""Samples from a run or a model: one prompt, a file of prompts (a line each), or a conversation.

python -m launch.sample --from_run=RUN --workdir=RUN --prompt='37+58='
python -m launch.sample --config.model=DIR --prompts_file=prompts.txt --samples=4
"""

import sys

from absl import flags as absl_flags

from launch import flags

PROMPT = absl_flags.DEFINE_string("prompt", "", "A prompt.")
PROMPTS_FILE = absl_flags.DEFINE_string("prompts_file", "", "A file of prompts, one a line.")
SAMPLES = absl_flags.DEFINE_integer("samples", 1, "Responses to each prompt.")
GREEDY = absl_flags.DEFINE_bool("greedy", False, "Take the likeliest token each time.")
SYSTEM = absl_flags.DEFINE_string(
    "system", None, "System prompt; of a run its task's, of a model its chat template's own."
)
SHOW_PROMPT = absl_flags.DEFINE_bool("show_prompt", False, "Print the prompt as it is rendered.")


def _prompts():
    if PROMPT.value:
        yield [PROMPT.value]
    elif PROMPTS_FILE.value:
        try:
            with open(PROMPTS_FILE.value, encoding="utf-8") as file:
                yield [line.rstrip("\n") for line in file if line.strip()]
        except OSError as error:
            raise ValueError(f"prompts_file {PROMPTS_FILE.value!r}: {error.strerror}") from None
    else:
        print("One prompt a line; an empty line ends.", file=sys.stderr)
        for line in sys.stdin:
            if not line.strip():
                return
            yield [line.rstrip("\n")]


def sample(config):
    """Prints the responses."""
    from research.loop import opened

    with opened(config, log=lambda line: print(line, file=sys.stderr)) as trainer:
        temperature = 0.0 if GREEDY.value else None
        system = trainer.task.system if absl_flags.FLAGS.from_run else None
        system = system if SYSTEM.value is None else SYSTEM.value
        for seed, prompts in enumerate(_prompts()):
            try:
                shown, responses = trainer.complete(
                    prompts,
                    system=system,
                    samples=SAMPLES.value,
                    temperature=temperature,
                    seed=seed,
                )
            except ValueError as error:
                if len(prompts) > 1 or PROMPT.value:
                    raise
                print(f"error: {error}", file=sys.stderr)
                continue
            for prompt, rendered, texts in zip(prompts, shown, responses):
                print(rendered if SHOW_PROMPT.value else prompt)
                for text in texts:
                    print(f"  {text!r}")


if __name__ == "__main__":
    flags.main(sample, __doc__, sampling__max_new_tokens=64)
