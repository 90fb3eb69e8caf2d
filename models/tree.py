"""Parameter trees as flat dictionaries: "layers/block/attention/q/kernel" -> leaf."""

from flax import traverse_util


def flatten(params) -> dict:
    """Returns {path with slashes: leaf}."""
    return traverse_util.flatten_dict(params, sep="/")


def unflatten(leaves) -> dict:
    """Returns the nested dict of {path with slashes: leaf}; the inverse of `flatten`."""
    return traverse_util.unflatten_dict(leaves, sep="/")
