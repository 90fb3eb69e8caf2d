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
from jax.experimental import multihost_utils
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
            local = [d for d in self.devices if d.process_index == jax.process_index()]
            every = NamedSharding(jax.sharding.Mesh(np.asarray(local), AXIS), PartitionSpec(AXIS))
            copies = jax.tree.map(
                lambda x: np.broadcast_to(np.asarray(x), (len(local), *np.shape(x))), tree
            )
            return jax.device_put(copies, every)
        # A copy first: what is placed is donated to the update, and may be another's as well.
        return jax.device_put(jax.tree.map(np.array, tree), self._shardings(tree))

    def _shardings(self, tree):
        """Where a tree lives on the mesh: a parameter, and the optimizer's moments of it, by the
        rule for its name."""

        def of(path, leaf):
            name = "/".join(str(getattr(k, "key", getattr(k, "name", ""))) for k in path)
            spec = leaf_spec(name, leaf.shape, self.mesh) if np.ndim(leaf) else PartitionSpec()
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(of, tree)

    def initialise(self, function: Callable, placed):
        """Returns `function(placed)`, a tree of arrays that is made where it is to live."""
        if self.kind == "pmap":
            return jax.pmap(function, axis_name=AXIS, devices=_pmap_devices(self))(placed)
        if self.kind == "jit":
            return jax.jit(function)(placed)
        found = self._shardings(jax.eval_shape(function, placed))
        return jax.jit(function, out_shardings=found)(placed)

    def fetch(self, tree):
        """Returns a placed tree on the host, as numpy."""
        if self.kind == "pmap":
            return jax.tree.map(_replica, tree)
        return jax.tree.map(_whole, tree)

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
          A function of the same form over host arrays, of any number of rows; they are padded with
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
                out = {k: _join(v) for k, v in out.items()}
            else:
                out = {k: _whole(v) for k, v in compiled(placed, self.shard_rows(padded)).items()}
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
                return state, jax.tree.map(_replica, metrics)

            return run
        compiled = {}

        def run(state, frozen, rows, constants):
            if not compiled:
                # Left to itself, the compiler may lay the new state out differently from the old.
                kept = None if self.mesh is None else jax.tree.map(lambda x: x.sharding, state)
                spread = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
                compiled["update"] = jax.jit(
                    function, donate_argnums=(0,), out_shardings=(kept, spread)
                )
            return compiled["update"](state, frozen, self.shard_rows(rows), constants)

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


def _replica(array):
    """One copy of an array that every device of a pmap holds, on the host."""
    return np.asarray(array.addressable_shards[0].data)[0]


def _whole(array):
    """An array on the host, whatever devices of whatever hosts its parts live on."""
    if not getattr(array, "is_fully_addressable", True):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _join(array):
    """[local, b, ...] on this host -> the rows of all hosts."""
    rows = np.asarray(array)
    if jax.process_count() > 1:
        rows = multihost_utils.process_allgather(rows).reshape(-1, *rows.shape[1:])
    return rows.reshape(-1, *rows.shape[2:])


def agreed(tree):
    """Returns what process 0 says of a tree of host arrays, on every process."""
    return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def connect(distributed) -> None:
    """Joins the processes of a run on several hosts, before anything touches a device.

    Args:
      distributed: the config's fields: `auto` (found in the environment: SLURM, Open MPI, TPU
        pods), or the `coordinator`'s address, the number of `processes` and this `process`.

    Raises:
      ValueError: the fields contradict one another.
    """
    d = distributed
    if d.auto:
        jax.distributed.initialize()
    elif d.processes > 1:
        if not d.coordinator or not 0 <= d.process < d.processes:
            raise ValueError(
                f"distributed.processes={d.processes} with coordinator={d.coordinator!r} and "
                f"process={d.process}: expected HOST:PORT and a process of 0..{d.processes - 1}."
            )
        jax.distributed.initialize(d.coordinator, d.processes, d.process)
