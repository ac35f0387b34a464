"""The process in which `distaff fit` compiles a step: one a step, for devices that this machine does not have.

It reads a question from the standard input and writes the answer to a file, both JSON, for compilers print what they
like.
"""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from distaff.core.errors import DistaffError, UsageError
from distaff.core.mesh import parse_mesh
from distaff.tasks import _flops, _slices
from distaff.tasks._planned import Planned, count_parameters


def main(path: str) -> None:
    """Answer the question of the standard input in the file `path`."""
    try:
        answer = answered(json.load(sys.stdin))
    except DistaffError as error:
        answer = {"error": str(error), "usage": isinstance(error, UsageError)}
    Path(path).write_text(json.dumps(answer))


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """Compile the step that `question` describes, and return what there is to say of it.

    module, flags_class, flags: of the recipe. topology, devices: the devices. limit: bytes of one, or None.
    """
    import jax

    module = importlib.import_module(question["module"])
    flags = getattr(module, question["flags_class"])(**question["flags"])
    slice_name = question["topology"]
    devices = jax.devices()[: question["devices"]] if slice_name is None else _slices.described_devices(slice_name)
    mesh = parse_mesh(flags.mesh, devices)
    planned: Planned = module.plan(flags, mesh)
    found = planned.measure(flags, mesh, limit=question["limit"])
    tokens = _tokens(planned)
    return {
        "footprint": dataclasses.asdict(found),
        "kind": devices[0].device_kind,
        "mesh": dict(mesh.shape),
        "local": len(devices) // len({device.process_index for device in devices}),
        "rows": planned.rows,
        "tokens": tokens,
        "flops": _flops.step_flops(planned),
        "parameters": count_parameters(planned.model),
        "able": sorted(_able(planned.model, flags)),
    }


def _tokens(planned: Planned) -> dict[str, int]:
    """Return the tokens a row, nothing for models that read none."""
    model = getattr(planned.model, "models", {"discriminator": planned.model})["discriminator"]
    if not hasattr(model.config, "num_attention_heads"):
        return {}
    return _flops.lengths(model, planned.batch)


def _able(model: Any, flags: Any) -> set[str]:
    """Return the flags that save memory and that model and optimizer heed."""
    models = getattr(model, "models", {"": model}).values()
    fields = ("gradient_checkpointing", "scan_layers")
    found = {name for name in fields if all(hasattr(part.module, name) for part in models)}
    return found | ({"moment_dtype"} & set(flags.optimizer_config().read()))


if __name__ == "__main__":
    main(sys.argv[1])
