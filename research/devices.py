"""How a step is laid out over devices: one, several under pmap, or a mesh under jit.

A `Layout` knows three things: how to place parameters, how to run a function over the rows of a
batch, and how to compile the update. Everything else in research/ sees whole batches on the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from models.sharding import leaf_spec

AXIS = "data"
MESH_AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices of a run.

    Attributes:
      kind: "jit" (one device), "pmap" (several, parameters replicated) or "mesh".
      devices: the devices, of all hosts.
      mesh: the mesh of kind "mesh".
    """

    kind: str
    devices: tuple
    mesh: Any = None

    @property
    def count(self) -> int:
        """Number of shards that the rows of a batch are split into."""
        if self.kind == "mesh":
            return int(np.prod([self.mesh.shape[a] for a in _row_axes(self.mesh)]))
        return len(self.devices)

    @property
    def local_count(self) -> int:
        """Shards that live on this host."""
        return self.count // jax.process_count() if self.kind == "pmap" else self.count

    @property
    def axis(self) -> str | None:
        """Name of the axis that a function under `update` may gather over."""
        return AXIS if self.kind == "pmap" else None

    def place(self, tree):
        """Copies a tree of parameters (or optimizer state) to the devices."""
        if self.kind == "jit":
            return jax.tree.map(jnp.array, tree)
        if self.kind == "pmap":
            return jax.device_put_replicated(tree, [d for d in self.devices if _is_local(d)])
        return jax.tree_util.tree_map_with_path(self._place_leaf, tree)

    def _place_leaf(self, path, leaf):
        """Places a parameter, or the optimizer's moments of it, by the rule for its name."""
        name = "/".join(str(getattr(k, "key", getattr(k, "name", ""))) for k in path)
        spec = leaf_spec(name, leaf.shape, self.mesh) if jnp.ndim(leaf) else PartitionSpec()
        return jax.device_put(jnp.array(leaf), NamedSharding(self.mesh, spec))

    def fetch(self, tree):
        """Returns a placed tree on the host, as numpy."""
        if self.kind == "pmap":
            tree = jax.tree.map(lambda leaf: leaf[0], tree)
        return jax.tree.map(np.asarray, jax.device_get(tree))

    def map_params(self, function: Callable) -> Callable:
        """Compiles `function(placed, constants) -> placed`, the same on every device."""
        if self.kind == "pmap":
            return jax.pmap(
                function, axis_name=AXIS, in_axes=(0, None), devices=_pmap_devices(self)
            )
        return jax.jit(function)

    def map_rows(self, function: Callable, *, rows_per_row: int = 1) -> Callable:
        """Compiles `function(placed, rows) -> rows` to run on every shard of the rows.

        Args:
          function: maps placed trees and a dict of arrays [b, ...] to a dict of arrays
            [b * rows_per_row, ...]; rows must not depend on one another.
          rows_per_row: rows out per row in.

        Returns:
          A function of the same form over host arrays of any number of rows; they are padded with
          copies of the last row to a multiple of the shards, and the padding is cut off again.
        """
        if self.kind == "pmap":
            compiled = jax.pmap(function, axis_name=AXIS, devices=_pmap_devices(self))
        else:
            compiled = jax.jit(function)

        def run(placed, rows):
            total = len(next(iter(rows.values())))
            padded = {k: _pad_rows(v, self.count, repeat=True) for k, v in rows.items()}
            if self.kind == "pmap":
                out = compiled(placed, {k: self._split(v) for k, v in padded.items()})
                out = {k: _join(self, v) for k, v in out.items()}
            else:
                out = compiled(placed, self.shard_rows(padded))
            return {k: v[: total * rows_per_row] for k, v in out.items()}

        return run

    def shard_rows(self, rows):
        """Places host arrays [B, ...] with their rows spread over the shards (not for pmap)."""
        if self.kind == "jit":
            return {k: jnp.asarray(v) for k, v in rows.items()}
        spec = NamedSharding(self.mesh, PartitionSpec(_row_axes(self.mesh)))
        return {k: jax.device_put(v, spec) for k, v in rows.items()}

    def _split(self, array):
        """[B, ...] of the host -> this host's shards [local, B / count, ...]."""
        shards = array.reshape(self.count, -1, *array.shape[1:])
        if jax.process_count() > 1:
            first = jax.process_index() * self.local_count
            shards = shards[first : first + self.local_count]
        return shards

    def compile_update(self, function: Callable) -> Callable:
        """Compiles `function(state, frozen, rows, constants) -> (state, metrics)`, donating state.

        Args:
          function: sees rows [b, ...] of its shard and whole-batch constants.
        """
        if self.kind == "pmap":
            compiled = jax.pmap(
                function,
                axis_name=AXIS,
                in_axes=(0, 0, 0, None),
                devices=_pmap_devices(self),
                donate_argnums=(0,),
            )

            def run(state, frozen, rows, constants):
                state, metrics = compiled(
                    state, frozen, {k: self._split(v) for k, v in rows.items()}, constants
                )
                return state, jax.tree.map(lambda m: m[0], metrics)

            return run
        compiled = jax.jit(function, donate_argnums=(0,))

        def run(state, frozen, rows, constants):
            return compiled(state, frozen, self.shard_rows(rows), constants)

        return run


def layout(devices: int = 0, mesh: str = "") -> Layout:
    """Returns the layout of a run.

    Args:
      devices: local devices under pmap; 0 is all, 1 is plain jit.
      mesh: axes and sizes, "data:2,fsdp:2,tensor:2"; takes precedence.

    Raises:
      ValueError: more devices than there are, or a malformed mesh.
    """
    if mesh:
        return Layout("mesh", tuple(jax.devices()), _mesh(mesh))
    local = jax.local_devices()
    if devices > len(local):
        raise ValueError(
            f"devices={devices}, but this host has {len(local)} ({local[0].platform})."
        )
    chosen = local[: devices or None]
    if jax.process_count() > 1:
        return Layout("pmap", tuple(jax.devices()))
    return Layout("jit" if len(chosen) == 1 else "pmap", tuple(chosen))


def _mesh(text):
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition(":")
        if name not in MESH_AXES or not size.isdigit():
            raise ValueError(
                f"mesh={text!r}: {part!r} is not AXIS:SIZE with an axis of {MESH_AXES}."
            )
        sizes[name] = int(size)
    total = int(np.prod(list(sizes.values())))
    if total > len(jax.devices()):
        raise ValueError(f"mesh={text!r} needs {total} devices; there are {len(jax.devices())}.")
    shape = [sizes.get(name, 1) for name in MESH_AXES]
    return jax.sharding.Mesh(np.asarray(jax.devices()[:total]).reshape(shape), MESH_AXES)


def _row_axes(mesh):
    return tuple(a for a in ("data", "fsdp") if a in mesh.shape)


def _is_local(device):
    return device.process_index == jax.process_index()


def _pmap_devices(plan):
    return plan.devices if jax.process_count() == 1 else None


def _pad_rows(array, multiple, repeat=False):
    array = np.asarray(array)
    short = -len(array) % multiple
    if not short:
        return array
    fill = np.repeat(array[-1:], short, axis=0)
    return np.concatenate([array, fill if repeat else np.zeros_like(fill)])


def pad_rows(rows, multiple):
    """Pads every array of a dict with zero rows to a multiple."""
    return {k: _pad_rows(v, multiple) for k, v in rows.items()}


def _join(plan, array):
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        gathered = multihost_utils.process_allgather(array, tiled=False)
        return np.asarray(gathered).reshape(-1, *array.shape[2:])
    return array.reshape(-1, *array.shape[2:])
