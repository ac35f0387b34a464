"""One safetensors file: reading it as views, writing it tensor by tensor.

The safetensors package is not used: its numpy `get_tensor` copies (500 MB of private memory for a 500 MB file), and its
`save_file` wants all tensors contiguous at once. The header is eight bytes of length and JSON.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from distaff.core.errors import CheckpointError
from distaff.hub.mapped import MappedFile, Tensor, raw_bytes

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000  # the limit of the format's own reader


def read_safetensors(file: MappedFile) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file by name, unread, and its metadata. Offsets are checked against the file's size."""
    path = file.path
    header, start = _header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"'{path}' has a damaged header (its metadata is not a mapping): download it again.")
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        spans.append((begin, end))
        tensors[name] = file.tensor(start + begin, shape, dtype)
    held, described = file.size - start, max((end for _, end in spans), default=0)
    if described > held:
        raise CheckpointError(
            f"'{path}' is truncated: its header describes {described:,} bytes of tensors and {held:,} follow it; "
            "download or save it again."
        )
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise CheckpointError(f"'{path}' is damaged: its tensors overlap or leave a gap at byte {position:,}.")
        position = end
    if position != held:
        raise CheckpointError(f"'{path}' is damaged: {held - position:,} bytes follow its last tensor.")
    return tensors, metadata


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.buffer[:8], "little")
    if file.size < 8 or length > MAX_HEADER:
        raise CheckpointError(f"'{file.path}' is not a safetensors file: its first bytes are not a header's length.")
    if 8 + length > file.size:
        raise CheckpointError(
            f"'{file.path}' is truncated inside its header, after {file.size:,} of at least {8 + length:,} bytes: "
            "download or save it again."
        )
    try:
        header = json.loads(file.buffer[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{file.path}' is not a safetensors file: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"'{file.path}' is not a safetensors file: its header is not a mapping.")
    return header, 8 + length


def _entry(path: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"'{path}' has a damaged header: the entry of '{name}' is not dtype, shape and offsets.")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(f"'{path}' stores '{name}' as {dtype_name}, which is none of {', '.join(DTYPES)}.")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(
            f"'{path}' has a damaged header: '{name}' of shape {shape} and dtype {dtype_name} "
            f"cannot take {end - begin:,} bytes."
        )
    return dtype, shape, begin, end


def write_safetensors(file: BinaryIO, tensors: Sequence[tuple[str, Any]], metadata: dict[str, str]) -> None:
    """Write `(name, array)` pairs; at most one tensor at a time is copied."""
    for name, tensor in tensors:
        if np.dtype(tensor.dtype).newbyteorder("=") not in NAMES:
            raise CheckpointError(f"safetensors has no dtype for '{name}', which is {tensor.dtype}: cast it first.")
    # Wide dtypes first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, tensor in ordered:
        dtype = np.dtype(tensor.dtype).newbyteorder("=")
        end = position + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(raw_bytes(tensor))
