"""Reading a checkpoint into another layout of the same model: layers stacked or apart, a vocabulary padded otherwise.

The target of a restore says how arrays shall be, a checkpoint how they are. `as_stored` gives the tree to read,
`as_wanted` turns what was read into the target's form. Both leave alone what is the same.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distaff.core.tree import STACKED, Tree, map_with_path, path_of

Shape = tuple[int, ...]


def as_stored(target: Tree, stored: Mapping[str, Shape], filled: Mapping[str, Shape]) -> Tree:
    """Return `target`, a tree of `ShapeDtypeStruct`, in the layout that the arrays `stored` by path have.

    `filled` has by path the shapes of padded parameters without their padding. Arrays that differ in anything else keep
    the shape that is wanted, so that a comparison finds them.
    """

    def subtree(key_path: Any, node: Any) -> Any:
        path = path_of(key_path)
        if _is_layers(node):
            node = _stored_layers(node, path, stored)

        def leaf_as_stored(inside: str, leaf: Any) -> Any:
            full = "/".join(filter(None, (path, inside)))
            return _stored_padding(leaf, stored.get(full), _ending(full, filled))

        return map_with_path(leaf_as_stored, node)

    return jax.tree_util.tree_map_with_path(subtree, target, is_leaf=_is_layers)


def as_wanted(read: Tree, target: Tree) -> Tree:
    """Return what was `read` of a tree that `as_stored` gave, in the form and on the devices of `target`."""

    def subtree(want: Any, have: Any) -> Any:
        if _is_layers(want) and STACKED in want and STACKED not in have:
            parts = [have[str(index)] for index in range(len(have))]
            have = {STACKED: jax.tree.map(_together, want[STACKED], *parts)}
        elif _is_layers(want) and STACKED in have and STACKED not in want:
            have = {
                name: jax.tree.map(partial(_apart, int(name)), layer, have[STACKED]) for name, layer in want.items()
            }
        return jax.tree.map(_fitted, want, have)

    return jax.tree.map(subtree, target, read, is_leaf=_is_layers)


def cut_off(read: Tree, target: Tree) -> list[str]:
    """Return the paths of arrays of which `target` has no place for more than padding, which is zeros."""
    wanted = _shapes(target)
    found = []
    for key_path, have in jax.tree_util.tree_leaves_with_path(read):
        shape = wanted.get(path_of(key_path), have.shape)
        if len(shape) == have.ndim and any(size < more for size, more in zip(shape, have.shape)):
            kept = jnp.count_nonzero(have[tuple(map(slice, shape))])
            if int(kept) != int(jnp.count_nonzero(have)):
                found.append(path_of(key_path))
    return found


def _shapes(tree: Tree) -> dict[str, Shape]:
    return {path_of(key_path): leaf.shape for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _is_layers(node: Any) -> bool:
    """Tell whether a node holds layers: one stacked one, or several by their numbers."""
    return isinstance(node, Mapping) and (STACKED in node or (bool(node) and set(node) == _numbers(len(node))))


def _numbers(count: int) -> set[str]:
    return {str(index) for index in range(count)}


def _stored_layers(node: Any, path: str, stored: Mapping[str, Shape]) -> Any:
    """Return the layers at `path` stacked where they are stored so, and apart where they are stored apart."""
    parts = [name.removeprefix(f"{path}/").partition("/")[0] for name in stored if name.startswith(f"{path}/")]
    count = len(set(parts))
    if STACKED in node and set(parts) == _numbers(count):

        def one(inside: str, leaf: Any) -> Any:
            if len(stored.get(f"{path}/0/{inside}", ())) == leaf.ndim:
                return leaf
            return _like(leaf, leaf.shape[1:], leaf.sharding.spec[1:])

        return dict.fromkeys(_numbers(count), map_with_path(one, node[STACKED]))
    if STACKED not in node and STACKED in parts:

        def every(inside: str, leaf: Any) -> Any:
            if len(stored.get(f"{path}/{STACKED}/{inside}", ())) == leaf.ndim:
                return leaf
            return _like(leaf, (len(node), *leaf.shape), (None, *leaf.sharding.spec))

        return {STACKED: map_with_path(every, node["0"])}
    return node


def _together(want: Any, *parts: Any) -> Any:
    """Return the arrays of layers as one. Adafactor has the same number in the place of what it does not keep."""
    return parts[0] if parts[0].ndim == want.ndim else jnp.stack(parts)


def _apart(index: int, want: Any, have: Any) -> Any:
    """Return the array of one layer."""
    return have if have.ndim == want.ndim else have[index]


def _stored_padding(leaf: Any, shape: Shape | None, filled: Shape | None) -> Any:
    """Return `leaf` with the stored `shape` where they differ on one axis, by padding behind what is `filled`."""
    if shape is None or filled is None or len(shape) != leaf.ndim:
        return leaf
    # Moments may lack axes of their parameter, as Adafactor's rows and columns do, and SM3's.
    parts = filled if len(filled) == leaf.ndim else (min(filled),) * leaf.ndim
    apart = [(one, other, part) for one, other, part in zip(shape, leaf.shape, parts) if one != other]
    padded = len(apart) == 1 and min(apart[0]) == apart[0][2]
    return _like(leaf, shape, leaf.sharding.spec) if padded else leaf


def _like(leaf: Any, shape: Shape, spec: Any) -> jax.ShapeDtypeStruct:
    """Return an array of another shape on the devices of `leaf`, whole along what does not divide."""
    mesh, kept = leaf.sharding.mesh, []
    for size, names in zip(shape, spec):
        parts = 1
        for name in () if names is None else (names,) if isinstance(names, str) else names:
            parts *= mesh.shape[name]
        kept.append(names if size % parts == 0 else None)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*kept)))


def _fitted(want: Any, have: Any) -> Any:
    """Return `have` cut or filled up with zeros to the shape of `want`, where `want` lies."""
    if have.shape != want.shape:
        have = have[tuple(map(slice, want.shape))]
        have = jnp.pad(have, [(0, more - size) for size, more in zip(have.shape, want.shape)])
    return have if have.sharding == want.sharding else jax.device_put(have, want.sharding)


def _ending(path: str, filled: Mapping[str, Shape]) -> Shape | None:
    """Return the shape of the parameter whose path ends `path`: moments stand under the paths of their parameters."""
    parts = path.split("/")
    # SM3 keeps a list under a parameter's path.
    ends = ("/".join(parts[start:end]) for end in (len(parts), len(parts) - 1) for start in range(end))
    return next((filled[end] for end in ends if end in filled), None)
