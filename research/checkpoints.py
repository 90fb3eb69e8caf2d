"""Checkpoints of a run (orbax), its saved config, and what a resume needs."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from research.config import ConfigError

MAY_DIFFER = (
    "workdir",
    "steps",
    "checkpoint",
    "devices",
    "mesh",
    "distributed",
    "evaluation",
    "reward_processes",
)
"""Fields that a resumed run may change: they do not alter the steps already taken."""


class Store:
    """The work directory of one run: `config.json`, `initial/`, `checkpoints/`.

    Steps are written asynchronously and atomically: a run that is killed while one is written
    resumes from the one before.
    """

    def __init__(self, workdir: Path, config: ConfigDict, log):
        self.workdir, self.log = Path(workdir).absolute(), log
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._check_config(config)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.checkpoint.keep, create=True, enable_async_checkpointing=True
        )
        self.manager = ocp.CheckpointManager(self.workdir / "checkpoints", options=options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.manager.wait_until_finished()
        self.manager.close()

    def _check_config(self, config):
        self.resolved = json.loads(config.to_json_best_effort())
        if (self.workdir / "config.json").exists():
            old = json.loads((self.workdir / "config.json").read_text())
            changes = [
                f"{k}: {a!r} -> {b!r}"
                for k, a, b in _differences(old, self.resolved)
                if k.split(".")[0] not in MAY_DIFFER
            ]
            if changes:
                raise ConfigError(
                    f"{self.workdir} holds a run of another config ({'; '.join(changes[:8])}). "
                    "Choose another --config.workdir, remove the directory, or restore the fields."
                )

    def save_config(self):
        """Writes the resolved config, enough to repeat the run."""
        if jax.process_index():
            return
        path = self.workdir / "config.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.resolved, indent=2) + "\n")
        path.with_suffix(".tmp").replace(path)  # a killed run leaves the whole file or none

    def initial(self):
        """The parameters after the warm-up (and an `sft` teacher's), or None."""
        path = self.workdir / "initial"
        if not path.exists():
            return None
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.tree.map(np.asarray, checkpointer.restore(path))

    def save_initial(self, tree):
        """Saves the parameters that the run, and every resume of it, starts from."""
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.workdir / "initial", tree)

    def save(self, step: int, snapshot):
        """Saves a step, unless it is saved already."""
        if step in self.manager.all_steps():
            return
        tree = {k: v for k, v in snapshot.items() if k != "meta"}
        tree["past"] = {str(i): p for i, p in enumerate(tree["past"])}
        self.manager.save(
            step,
            args=ocp.args.Composite(
                tree=ocp.args.StandardSave({k: v for k, v in tree.items() if jax.tree.leaves(v)}),
                meta=ocp.args.JsonSave(snapshot["meta"]),
            ),
        )

    def latest(self, template):
        """The newest checkpoint that can be read, or None where there is none at all.

        Args:
          template: shapes of the update's state.

        Raises:
          ConfigError: there are checkpoints, but none can be read.
        """
        damaged = []
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                found = self._read(step, template)
            except Exception as error:  # whatever orbax meets in a damaged directory
                self.log(
                    f"checkpoint {self.workdir / 'checkpoints' / str(step)} cannot be read "
                    f"({type(error).__name__}: {str(error)[:200]}); trying the one before"
                )
                damaged.append(step)
                continue
            for bad in damaged:
                self.manager.delete(bad)  # the step will be taken, and saved, again
            return found
        if damaged:
            raise ConfigError(
                f"None of the checkpoints in {self.workdir / 'checkpoints'} can be read (steps "
                f"{', '.join(map(str, sorted(damaged)))}). Remove that directory to start again "
                "from the warm-up, or choose another --config.workdir."
            )
        return None

    def _read(self, step, template):
        meta = self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        found = self.manager.restore(
            step, args=ocp.args.Composite(tree=ocp.args.StandardRestore())
        ).tree
        state = jax.tree_util.tree_map_with_path(
            lambda path, like: _stored(found["state"], path, like), template
        )
        past = [
            jax.tree_util.tree_map_with_path(
                lambda path, like, i=i: _stored(found["past"][str(i)], path, like), template.params
            )
            for i in range(meta["past"])
        ]
        return {
            "state": state,
            "past": past,
            "carried": found.get("carried", {}),
            "meta": meta,
        }


def _stored(tree, path, like):
    """The array of a restored tree at a path; orbax restores classes as dicts, in its own order."""
    for key in path:
        tree = tree[next(getattr(key, n) for n in ("name", "key", "idx") if hasattr(key, n))]
    if tree.shape != like.shape or tree.dtype != like.dtype:
        name = jax.tree_util.keystr(path)
        raise ValueError(
            f"{name} is {tree.dtype}{list(tree.shape)}, expected {like.dtype}{list(like.shape)}"
        )
    return np.asarray(tree)


def _differences(old, new, prefix=""):
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        path = f"{prefix}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{path}.")
        elif a != b:
            yield path, a, b
