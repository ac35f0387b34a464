"""Meshes with the named axes `data`, `fsdp` and `tensor`, and where batches and parameters go on them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from distaff.core.errors import UsageError
from distaff.core.tree import Tree

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Which mesh axis a parameter's logical axis is split over. Axes that are not named here are replicated.
RULES = {"vocab": "tensor", "heads": "tensor", "mlp": "tensor", "embed": "fsdp"}


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
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def _check_processes(devices: Sequence[Any], sizes: Sequence[int]) -> None:
    """Raise `UsageError` where several processes would need the same rows: each is dealt rows of its own."""
    processes = len({device.process_index for device in devices})
    local = len(devices) // processes
    if processes > 1 and local % sizes[2]:
        raise UsageError(
            f"A mesh with tensor={sizes[2]} splits one row over processes of {local} devices each: choose a tensor "
            f"size that divides {local}, and give the rest to fsdp."
        )


def batch_devices(mesh: Mesh) -> int:
    """Return over how many devices the rows of a batch are split."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Return the sharding of `[*leading, batch, ...]` arrays: rows split, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of a parameter with logical `axes`; a dimension that does not divide stays whole."""
    spec: list[str | None] = []
    for size, axis in zip(shape, axes):
        mesh_axis = RULES.get(axis) if axis else None
        divides = mesh_axis is not None and size % mesh.shape[mesh_axis] == 0 and mesh_axis not in spec
        spec.append(mesh_axis if divides else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def place(batch: Tree, sharding: NamedSharding) -> Tree:
    """Put the rows that this process holds of a global batch onto their devices."""
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)
