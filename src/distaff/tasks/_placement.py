"""How the parameters of a model lie on a mesh, as a table (`--print_placement`)."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from distaff.core.mesh import RULES, divides
from distaff.core.processes import is_first
from distaff.core.tree import flatten
from distaff.pretrained import FlaxPreTrainedModel
from distaff.tasks._flags import ModelFlags
from distaff.tasks._planned import parts
from distaff.train.state import opt_state_shardings

_HEADER = ("parameter", "of them", "shape", "split over", "MB a device", "")


def show(flags: ModelFlags, model: Any, tx: optax.GradientTransformation, mesh: Mesh) -> None:
    """With --print_placement, print a line a parameter, those of layers together, and what a device holds of all."""
    if not (flags.print_placement and is_first()):
        return
    table: list[tuple[str, ...]] = [_HEADER]
    for name, part in getattr(model, "models", {"": model}).items():
        table += _lines(part, mesh, f"{name}/" if name else "")
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    print(_totals(model, tx, mesh))


def _lines(model: FlaxPreTrainedModel, mesh: Mesh, prefix: str) -> Iterator[tuple[str, ...]]:
    shapes, shardings, axes = flatten(model.params_shape_tree), model.param_shardings(mesh), model.logical_axes()
    filled = model.filled_shapes()
    counts: dict[tuple[str, ...], int] = {}
    for path, leaf in shapes.items():
        sharding = shardings[path]
        local = sharding.shard_shape(leaf.shape)
        spec = ", ".join(str(name or "-") for name in (*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec))))
        line = (
            prefix + re.sub(r"/\d+(?=/)", "/{i}", path),
            f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]",
            spec or "-",
            f"{_megabytes(local, leaf.dtype):.2f}",
            _remark(model, mesh, leaf.shape, axes[path], filled.get(path, leaf.shape)),
        )
        counts[line] = counts.get(line, 0) + 1
    for (path, *rest), count in counts.items():
        yield path, str(count), *rest


def _remark(model: FlaxPreTrainedModel, mesh: Mesh, shape: Any, axes: Any, filled: Any) -> str:
    """Say what is padded, and what stays whole because it does not divide."""
    units, remarks = model.indivisible(), []
    for size, part, axis in zip(shape, filled, axes):
        if part != size:
            remarks.append(f"{size - part} entries of padding")
        if axis in RULES and not divides(mesh, size, axis, units):
            what = f"{units.get(axis, size)} {axis}"
            remarks.append(f"{what} do not divide by {RULES[axis]}={mesh.shape[RULES[axis]]}: whole")
    return "; ".join(remarks)


def _totals(model: Any, tx: optax.GradientTransformation, mesh: Mesh) -> str:
    trained, _ = parts(model.params)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trained)
    placed = jax.tree.map(lambda leaf: leaf.sharding, trained)
    moments = jax.eval_shape(tx.init, params)
    sizes = [_sum(params, placed), _sum(moments, opt_state_shardings(moments, params, placed, mesh))]
    named = zip(("parameters", "optimizer state"), sizes)
    return "; ".join(f"{name}: {here:,.1f} MB of {whole:,.1f} on a device" for name, (here, whole) in named)


def _sum(tree: Any, shardings: Any) -> tuple[float, float]:
    """Return how many MB of a tree lie on each device, and how many it has."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(shardings)))
    here = sum(_megabytes(sharding.shard_shape(leaf.shape), leaf.dtype) for leaf, sharding in pairs)
    return here, sum(_megabytes(leaf.shape, leaf.dtype) for leaf, _ in pairs)


def _megabytes(shape: Any, dtype: Any) -> float:
    return jax.ShapeDtypeStruct(shape, dtype).size * dtype.itemsize / 1e6
