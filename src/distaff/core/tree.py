"""'/'-separated paths and nested dicts: the only place that flattens and unflattens parameters.

jax is imported where it is needed: reading files needs these paths and no jax.
"""

from collections.abc import Callable, Mapping
from typing import Any

Tree = Any

# The name of a stack's only layer where its layers are stacked, in the place of the numbers "0", "1", ...
STACKED = "stacked"


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"a/b": leaf}` for nested mappings. An empty mapping has no leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{path}": leaf for path, leaf in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dicts that `flatten` took apart."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def path_of(key_path) -> str:
    """Return the '/'-path of a `jax.tree_util` key path."""
    import jax

    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def map_with_path(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Map `function(path, leaf)` over any pytree, optimizer states included."""
    import jax

    return jax.tree_util.tree_map_with_path(lambda key_path, leaf: function(path_of(key_path), leaf), tree)
