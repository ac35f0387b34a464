"""Slices of TPUs that need not be there: the compiler in libtpu makes programs for them on any machine."""

import re
from collections.abc import Sequence
from typing import Any

from distaff.core.errors import UsageError

GIB = 2**30
# GiB that a program may have on a device of the kind, as the compiler of libtpu 0.0.42 says of one that is too large:
# what the chip has (v2, v3: a core of it; tpu7x: a half) less what the system keeps.
MEMORY = {"v2": 7.48, "v3": 15.48, "v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
# Names that are rented, whose number counts cores for v2 to v4 and v5p, and chips for the others.
RENTED = {
    "v2-8": "v2:2x2",
    "v3-8": "v3:2x2",
    "v4-8": "v4:2x2x1",
    "v5p-8": "v5p:2x2x1",
    "v5e-1": "v5e:1x1",
    "v5e-4": "v5e:2x2",
    "v5e-8": "v5e:2x4",
    "v5e-16": "v5e:4x4",
    "v6e-1": "v6e:1x1",
    "v6e-4": "v6e:2x2",
    "v6e-8": "v6e:2x4",
    "v6e-16": "v6e:4x4",
}
# What the process must know before jax is imported, so that it looks for no TPU, asks no server, and compiles beside
# another process that has the library.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_NAME = re.compile(r"(\w+):(\d+(?:x\d+){1,2})")
# Kinds whose hosts have up to eight chips in a grid of two dimensions.
_FLAT = ("v5e", "v6e")
_CHIPS_A_HOST = 8


def topology(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the kind of chip and the grid of chips that `name` says, as v5e:2x4 or v5e-8 do."""
    found = _NAME.fullmatch(RENTED.get(name.replace("v5litepod", "v5e"), name))
    if found is None or found[1] not in MEMORY:
        raise UsageError(
            f"--topology '{name}' is not known: name one of {', '.join(RENTED)}, or a kind and a grid of chips as in "
            f"v5e:2x4 or v4:2x2x2, of {', '.join(MEMORY)}."
        )
    return found[1], tuple(int(side) for side in found[2].split("x"))


def memory(name: str) -> int:
    """Return how many bytes a program may have on a device of the slice."""
    return int(MEMORY[topology(name)[0]] * GIB)


def described_devices(name: str) -> Sequence[Any]:
    """Return the devices of the slice `name`, for which programs can be compiled and not run."""
    import jax
    from jax.experimental import topologies

    kind, grid = topology(name)
    options: dict[str, Any] = {}
    if kind == "v4":
        options["chip_config_name"] = "megacore"  # a device a chip, as on the machines
    if kind in _FLAT and len(grid) == 2 and grid[0] * grid[1] <= _CHIPS_A_HOST:
        options["chips_per_host_bounds"] = (*grid, 1)
    text = f"{kind}:{'x'.join(map(str, grid))}"
    try:
        return topologies.get_topology_desc(text, platform="tpu", **options).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UsageError(f"--topology '{name}' is no slice that libtpu can describe: {reason}.") from error
