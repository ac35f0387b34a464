"""What makes a step need less memory, in the order in which it is tried: the cheapest first.

1. Layers are computed again in the backward pass, and scanned. 2. Fewer rows at a time, and more micro-batches: the
rows of a step stay. 3. Parameters and optimizer split over `fsdp`, 4. and over `tensor`. 5. First moments in bfloat16.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Flags and their values.
Changes = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was asked for, as far as it matters here.

    flags: their values. mesh: its sizes. rows: of a step. local: devices a process. able: the flags that the recipe's
    model and optimizer heed.
    """

    flags: Mapping[str, Any]
    mesh: Mapping[str, int]
    rows: int
    local: int
    able: frozenset[str]

    def changed(self, changes: Changes) -> Changes:
        """Return those of `changes` that are other than what was asked for."""
        return {name: value for name, value in changes.items() if self.flags[name] != value}


def search(setting: Setting, fits: Callable[[Changes], bool]) -> Changes | None:
    """Return the first changes with which the step fits, None where there are none.

    `fits` is costly. Of the same step with fewer rows at a time the smallest is tried after the largest: if that does
    not fit, none in between does.
    """
    for base, batch_devices in _bases(setting):
        every = [{**base, **rows} for rows in _rows(setting, batch_devices)]
        if not every:
            continue
        first, *fewer = every
        if fits(first):
            return first
        if fewer and fits(fewer[-1]):
            return next(changes for changes in fewer if changes == fewer[-1] or fits(changes))
    return None


def _bases(setting: Setting) -> Iterator[tuple[Changes, int]]:
    """Yield what is changed besides the rows, and over how many devices rows are split."""
    lighter: Changes = {}
    if "gradient_checkpointing" in setting.able:
        lighter["gradient_checkpointing"] = "full"
    if "scan_layers" in setting.able:
        lighter["scan_layers"] = True
    meshes = list(_meshes(setting))
    for moments in ({}, {"moment_dtype": "bfloat16"}) if "moment_dtype" in setting.able else ({},):
        for mesh, batch_devices in meshes:
            yield setting.changed({**lighter, **mesh, **moments}), batch_devices


def _meshes(setting: Setting) -> Iterator[tuple[Changes, int]]:
    """Yield the mesh that was asked for, and those that split parameters more."""
    devices = setting.mesh["data"] * setting.mesh["fsdp"] * setting.mesh["tensor"]
    yield {}, setting.mesh["data"] * setting.mesh["fsdp"]
    tensor = 1
    while devices > 1 and tensor <= setting.local and devices % tensor == 0:
        sizes = {"data": 1, "fsdp": devices // tensor, "tensor": tensor}
        if sizes != dict(setting.mesh) and tensor >= setting.mesh["tensor"]:
            split = "" if tensor == 1 else f",tensor={tensor}"
            yield {"mesh": f"fsdp=-1{split}"}, devices // tensor
        tensor *= 2


def _rows(setting: Setting, batch_devices: int) -> Iterator[Changes]:
    """Yield rows a device and micro-batches that make the rows of a step, at most as many a device as asked for."""
    each, left = divmod(setting.rows, batch_devices)
    most = setting.flags["per_device_train_batch_size"]
    while not left and most:
        size = max(number for number in range(1, most + 1) if each % number == 0)
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": each // size}
        yield setting.changed(changes)
        most = size // 2
