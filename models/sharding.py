"""Where parameters live on a mesh with axes data, fsdp and tensor: rules by parameter name."""

import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.tree import flatten, unflatten

# The first rule whose pattern ends the path names the mesh axes of the leaf's last dimensions;
# the stacked layer axis is never split. `tensor` splits heads, MLP features, vocabulary and
# experts (so each branch needs one sum over it); `fsdp` splits the other side of each matrix.
RULES = (
    (r"embed/embedding", ("tensor", "fsdp")),
    (r"head/kernel", ("fsdp", "tensor")),
    (r"(q|k|v|gate|up)/kernel", ("fsdp", "tensor")),
    (r"(q|k|v|gate|up)/bias", ("tensor",)),
    (r"(q|k|v|gate|up)/lora_a", ("fsdp", None)),
    (r"(q|k|v|gate|up)/lora_b", (None, "tensor")),
    (r"(o|down)/kernel", ("tensor", "fsdp")),
    (r"(o|down)/lora_a", ("tensor", None)),
    (r"(o|down)/lora_b", (None, "fsdp")),
    (r"moe/(gate|up)", ("tensor", "fsdp", None)),
    (r"moe/down", ("tensor", None, "fsdp")),
    (r"(router|join)/kernel", ("fsdp", None)),
    (r"scale|bias|value_head/kernel", ()),
)


def leaf_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the partition of one parameter.

    A mesh axis that the mesh lacks, or that does not divide its dimension, is left out: the
    dimension is replicated.

    Args:
      path: the leaf's name, e.g. "layers/block/attention/q/kernel".
      shape: its shape.
      mesh: the device mesh.

    Raises:
      ValueError: a leaf that no rule covers.
    """
    axes = next((a for pattern, a in RULES if re.search(rf"(^|/)({pattern})$", path)), None)
    if axes is None:
        raise ValueError(f"no sharding rule covers parameter {path!r} of shape {shape}")
    axes = (None,) * (len(shape) - len(axes)) + axes

    def usable(axis, size):
        return axis in mesh.shape and size % mesh.shape[axis] == 0

    return PartitionSpec(*(a if usable(a, size) else None for a, size in zip(axes, shape)))


def param_specs(params, mesh: Mesh) -> dict:
    """Returns the tree of PartitionSpecs of `params` (arrays or shapes)."""
    return unflatten({p: leaf_spec(p, leaf.shape, mesh) for p, leaf in flatten(params).items()})


def shard(params, mesh: Mesh) -> dict:
    """Returns `params` placed on the mesh by `param_specs`."""
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
        params,
        param_specs(params, mesh),
    )
