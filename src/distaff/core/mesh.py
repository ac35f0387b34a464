"""Meshes with the named axes `data`, `fsdp` and `tensor`, and where batches and parameters go on them."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from distaff.core.errors import UsageError
from distaff.core.tree import Tree

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Which mesh axis a parameter's logical axis is split over. Axes that are not named here are replicated.
RULES = {"vocab": "tensor", "heads": "tensor", "mlp": "tensor", "embed": "fsdp"}
# The same for activations: rows go where their batch goes, and their features stay whole between layers.
ACTIVATION_RULES = {"batch": BATCH_AXES, "vocab": ("tensor",), "heads": ("tensor",), "mlp": ("tensor",)}


def make_mesh(*, data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh over `devices` (all by default); one size may be -1 and takes what the others leave."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    known = int(np.prod([size for size in sizes if size != -1]))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UsageError(
            f"A mesh needs positive sizes, at most one of them -1, not data={data}, fsdp={fsdp}, tensor={tensor}."
        )
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if int(np.prod(sizes)) != len(devices):
        raise UsageError(
            f"A mesh of {' x '.join(f'{axis}={size}' for axis, size in zip(AXES, sizes))} does not fill "
            f"{len(devices)} devices: choose sizes whose product is {len(devices)}."
        )
    _check_processes(devices, sizes)
    # Under Explicit axes, the default of jax.make_mesh, Linen's embedding lookups fail to trace.
    auto = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(tuple(sizes), AXES, axis_types=auto, devices=devices)
    except NotImplementedError:
        # Sizes that cut through a side of the grid of chips: jax does that by itself for v5e alone.
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(placed, AXES, axis_types=auto)


def checked_mesh(mesh: Any) -> Mesh:
    """Return `mesh`, or the one that a text describes. Raises `UsageError` for one without the axes that are used."""
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if isinstance(mesh, Mesh):
        kinds = dict(zip(mesh.axis_names, mesh.axis_types))
        if all(kinds.get(axis) is AxisType.Auto for axis in AXES):
            return mesh
        said = ", ".join(f"{axis} ({kind.name})" for axis, kind in kinds.items())
    else:
        said = f"a {type(mesh).__name__}"
    raise UsageError(
        f"The mesh is {said}: it needs the axes {', '.join(AXES)} of the type Auto, as make_mesh(data=2, fsdp=4) "
        "makes it."
    )


def _check_processes(devices: Sequence[Any], sizes: Sequence[int]) -> None:
    """Raise `UsageError` where several processes would need the same rows: each is dealt rows of its own."""
    processes = len({device.process_index for device in devices})
    local = len(devices) // processes
    if processes > 1 and local % sizes[2]:
        raise UsageError(
            f"A mesh with tensor={sizes[2]} splits one row over processes of {local} devices each: choose a tensor "
            f"size that divides {local}, and give the rest to fsdp."
        )


def parse_mesh(text: str | None, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh that `data=2,fsdp=2,tensor=2` describes, and for None that of all devices on `data`.

    Axes that are not named have size 1, but `data` has the rest. Raises UsageError for anything else.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or not equals or name in sizes or not re.fullmatch(r"-?[0-9]+", size):
            raise UsageError(
                f"The mesh '{text}' is not understood at '{part}': write each of {', '.join(AXES)} at most once with "
                "its size, as in data=2,fsdp=2,tensor=2; -1 is what the others leave."
            )
        sizes[name] = int(size)
    sizes.setdefault("data", 1 if -1 in sizes.values() else -1)
    return make_mesh(**sizes, devices=devices)


def on(mesh: Mesh | None, *arguments: Tree) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a program that is compiled knows its mesh, for `constrain`.

    Without a mesh nothing changes, and neither where `arguments` are traced: the program around says where it runs.
    """
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
    return contextlib.nullcontext() if mesh is None or mesh.size == 1 or traced else jax.set_mesh(mesh)


def constrain(values: jax.Array, *axes: str | None) -> jax.Array:
    """Keep `values` on the devices that their logical `axes` name, on the mesh of `on`; without a mesh, as they are.

    A dimension that does not divide stays whole. Between layers this is what tells the compiler to bring parameters
    to the rows and not rows to the parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return values
    spec = []
    for size, axis in zip(values.shape, axes, strict=True):
        names = ACTIVATION_RULES[axis] if axis else ()
        parts = int(np.prod([mesh.shape[name] for name in names]))
        spec.append(names if parts > 1 and size % parts == 0 else None)
    return jax.lax.with_sharding_constraint(values, PartitionSpec(*spec))


def batch_devices(mesh: Mesh) -> int:
    """Return over how many devices the rows of a batch are split."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Return the sharding of `[*leading, batch, ...]` arrays: rows split, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(
    mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None], units: Mapping[str, int] | None = None
) -> NamedSharding:
    """Return the sharding of a parameter with logical `axes`; a dimension that does not divide stays whole.

    `units` says of how many indivisible parts a logical axis consists: attention heads are never cut.
    """
    spec: list[str | None] = []
    for size, axis in zip(shape, axes):
        mesh_axis = RULES.get(axis) if axis else None
        spec.append(mesh_axis if mesh_axis and divides(mesh, size, axis, units) and mesh_axis not in spec else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def divides(mesh: Mesh, size: int, axis: str | None, units: Mapping[str, int] | None = None) -> bool:
    """Tell whether a dimension of `size` on the logical `axis` can be split over the mesh axis of its rule."""
    parts = mesh.shape[RULES[axis]] if axis in RULES else 1
    return size % parts == 0 and (units or {}).get(axis or "", size) % parts == 0


def on_devices(tree: Tree, mesh: Mesh) -> Tree:
    """Return `tree` on the devices of `mesh`: what lies there stays as it lies, all else comes whole to each."""
    devices = list(mesh.devices.flat)

    def brought(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and list(sharding.mesh.devices.flat) == devices:
            return leaf
        return jax.device_put(leaf, replicated(mesh))

    return jax.tree.map(brought, tree)


def place(batch: Tree, sharding: NamedSharding) -> Tree:
    """Put the rows that this process holds of a global batch onto their devices."""
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)
