"""Flags of a run: the paper picks the config, stage flags swap its parts, overrides do the rest."""

import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, FieldReference, config_flags

from losses.catalogue import CatalogueError, nearest
from research.config import FIELDS, FLAGS, ConfigError, build, field_paths, saved
from research.devices import connect

USAGE = """{doc}

A run is built in three layers:
  --paper=SLUG                       the paper's stages, their defaults, and the task and settings
                                     in which its mechanism shows (python -m launch.papers)
  --advantage, --credit, --objective, --regularizers
                                     replace a stage by the name of a function or of a paper;
                                     --credit and --regularizers take comma-separated lists
  --config.FIELD=VALUE               override anything

Fields of the config:
{fields}

Stages of --paper={paper}:
{stages}
"""


def _given(argv: Sequence[str], name: str, default: str = "") -> str:
    value = default
    for i, arg in enumerate(argv):
        if re.fullmatch(rf"--?{name}", arg) and i + 1 < len(argv):
            value = argv[i + 1]
        elif match := re.match(rf"--?{name}=(.*)", arg):
            value = match.group(1)
    return value


def _open_fields(config, argv):
    """Adds the fields that are named by what they configure: rewards, model fields, task's own."""
    for arg in argv:
        if match := re.match(r"--?config\.((?:rewards|model_fields)\.[^=]+)", arg):
            *parents, leaf = match.group(1).split(".")
            where = config
            for name in parents:
                if not isinstance(where.get(name), ConfigDict):
                    where[name] = ConfigDict()
                where = where[name]
            if leaf not in where:
                where[leaf] = FieldReference(None, field_type=object)
        if match := re.match(r"--?config\.task\.([^=]+)", arg):
            if match.group(1) not in config.task and config.task.name == "reasoning_gym":
                config.task[match.group(1)] = FieldReference(None, field_type=object)


def _known_override(config, argv):
    known = field_paths(config)
    for arg in argv:
        if match := re.match(r"--?(?:no)?config\.([^=]+)", arg):
            path = match.group(1)
            if path not in known:
                raise ConfigError(
                    f"Unknown field --config.{path}.{nearest(path, known)} "
                    "--help lists every field."
                )


def define(doc: str, argv: Sequence[str] | None = None, **defaults):
    """Defines --paper, the stage flags, --workdir and --config on absl's FLAGS.

    Args:
      doc: what the launcher does, for --help.
      argv: the command line; sys.argv by default. It is read here, before absl parses it, since
        the fields of --config depend on the paper and its stages.
      **defaults: dotted paths (with __ for .) of fields whose default the launcher changes.

    Returns:
      A function that returns the resolved config once absl has parsed the flags.

    Raises:
      ConfigError, CatalogueError: an unknown paper, stage, task or field.
    """
    argv = list(sys.argv if argv is None else argv)
    flags.DEFINE_string("from_run", "", "Start from the config that this run saved.")
    flags.DEFINE_string("paper", "grpo", "Slug of the paper to run.")
    for slot in FLAGS:
        flags.DEFINE_string(slot, "", f"Replace the {slot} by functions or papers of these names.")
    flags.DEFINE_string("workdir", "", "Work directory; the same as --config.workdir.")
    paper = _given(argv, "paper", "grpo")
    stages = {slot: _given(argv, slot) for slot in FLAGS}
    task = _given(argv, r"config\.task\.name")
    overrides = {k.replace("__", "."): v for k, v in defaults.items()}
    if task:
        overrides["task.name"] = task
    run = _given(argv, "from_run")
    config = saved(run) if run else build(paper, overrides=overrides, **stages)
    _open_fields(config, argv)
    _known_override(config, argv)

    config_flags.DEFINE_config_dict("config", config, sys_argv=argv)
    _install_help(doc, config)

    def resolved():
        found = flags.FLAGS.config
        if flags.FLAGS.workdir:
            found.workdir = flags.FLAGS.workdir
        return found

    return resolved


def _install_help(doc, config):
    def lines(paths, meaning):
        return "\n".join(f"  --config.{p} = {_value(config, p)!r}{meaning(p)}" for p in paths)

    fixed = [p for p in FIELDS if p in field_paths(config)]
    free = [p for p in field_paths(config) if p not in FIELDS and not p.startswith("stages.")]
    text = USAGE.format(
        doc=doc,
        fields=lines(fixed, lambda p: f"\n      {FIELDS[p][1]}"),
        stages=lines(free, lambda p: ""),
        paper=config.paper,
    )
    sys.modules["__main__"].__doc__ = text


def _value(config, path):
    for name in path.split("."):
        config = config[name]
    return config


def main(run: Callable, doc: str, **defaults):
    """Defines the flags, parses them, calls `run(config)`; errors of use are one paragraph."""
    logging.set_verbosity(logging.WARNING)
    try:
        resolved = define(doc, **defaults)
    except (ConfigError, CatalogueError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

    def call(argv):
        if len(argv) > 1:
            print(
                f"error: unexpected argument {argv[1]!r}; flags are --NAME=VALUE", file=sys.stderr
            )
            sys.exit(2)
        try:
            config = resolved()
            connect(config.distributed)
            run(config)
        except (ConfigError, CatalogueError, ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    app.run(call)
