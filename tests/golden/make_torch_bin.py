"""Writes the small `pytorch_model.bin` files of tests/golden/bin. Needs torch; run it from anywhere.

Each state dict comes as zip and as legacy file, next to `expected.npz` with the same values (bfloat16 as float32).
"""

import collections
import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent / "bin"


class Evil:
    """Unpickling it would run a command."""

    def __reduce__(self):
        return os.system, ("echo executed > executed-by-pickle",)


def state_dict() -> collections.OrderedDict:
    torch.manual_seed(0)
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = collections.OrderedDict()
    state["base"] = base
    state["tied"] = base
    state["transposed"] = base.t()
    state["sliced"] = base[1:3, ::2]
    state["parameter"] = torch.nn.Parameter(torch.randn(3, 2))
    state["half"] = torch.tensor([1.5, -2.25], dtype=torch.float16)
    state["bfloat16"] = torch.tensor([[1.0, 3.140625], [-0.5, 1e30]], dtype=torch.bfloat16)
    state["double"] = torch.tensor([1 / 3], dtype=torch.float64)
    for name in ("int8", "int16", "int32", "int64", "uint8"):
        state[name] = torch.arange(5).to(getattr(torch, name))
    state["bool"] = torch.tensor([True, False, True])
    state["scalar"] = torch.tensor(7, dtype=torch.int64)
    state["empty"] = torch.zeros(0, 3)
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    return state


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    state = state_dict()
    expected = {name: (t.float() if t.dtype == torch.bfloat16 else t).detach().numpy() for name, t in state.items()}
    np.savez(FOLDER / "expected.npz", **expected)
    torch.save(state, FOLDER / "zip.bin")
    torch.save(state, FOLDER / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save({"small": torch.tensor([1, 2], dtype=torch.uint16)}, FOLDER / "uint16.bin")
    torch.save({"state_dict": dict(state), "epoch": 3}, FOLDER / "nested.bin")
    torch.save({"weight": torch.ones(2), "evil": Evil()}, FOLDER / "evil_zip.bin")
    torch.save(
        {"weight": torch.ones(2), "evil": Evil()}, FOLDER / "evil_legacy.bin", _use_new_zipfile_serialization=False
    )
    torch.save({"complex": torch.ones(2, dtype=torch.complex64)}, FOLDER / "complex.bin")
    torch.save({"sparse": torch.eye(2).to_sparse()}, FOLDER / "sparse.bin")
    (FOLDER / "evil_plain.bin").write_bytes(pickle.dumps(Evil()))
    packed = io.BytesIO()
    with zipfile.ZipFile(FOLDER / "zip.bin") as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    (FOLDER / "compressed.bin").write_bytes(packed.getvalue())


if __name__ == "__main__":
    main()
