"""`pytorch_model.bin` without torch: the zip form and the pickle form before it (torch < 1.6), read as views.

A pickle can call anything that it can name. Here it can name only an ordered dict, a tuple, dtypes, and the functions
that put a tensor together, which are our own; everything else is refused before anything runs.
"""

import math
import mmap
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import ml_dtypes
import numpy as np

from distaff.core.errors import CheckpointError
from distaff.hub.mapped import MappedFile, Tensor, view

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_BYTES = 2**63 - 1  # a stride of 0 makes a tensor larger than its storage, but numpy addresses no more

# Storages by key: the buffer that holds their bytes, where they begin in it, and their length.
Places = dict[str, tuple[mmap.mmap | bytes, int, int]]

STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
# torch has no storage class for these: such tensors name the dtype and an untyped storage.
DTYPES = {
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a storage class or a dtype of torch stands for in a pickle; it cannot be called."""

    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class _Storage:
    """A run of bytes elsewhere in the file: its key, and its length in elements of `dtype` (bytes if untyped)."""

    key: str
    dtype: np.dtype
    size: int


@dataclass(frozen=True, slots=True)
class _Strided:
    """A tensor as the pickle describes it, in elements. Nothing about it has been checked."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any
    dtype: Any


class _Restricted(pickle.Unpickler):
    """An unpickler that builds a state dict's skeleton and can do nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # Made anew for each file: a pickle may set attributes on what it has named.
        def tensor(storage, offset, shape, strides, *_rest):
            return _Strided(storage, offset, shape, strides, storage.dtype)

        def tensor_of_dtype(storage, offset, shape, strides, _grad, _hooks, kind, *_rest):
            return _Strided(storage, offset, shape, strides, kind.dtype)

        def parameter(data, *_rest):
            return data

        functions: dict[str, Callable] = {
            "_rebuild_tensor": tensor,
            "_rebuild_tensor_v2": tensor,
            "_rebuild_tensor_v3": tensor_of_dtype,
            "_rebuild_parameter": parameter,
        }
        if module == "torch._utils" and name in functions:
            return functions[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in STORAGES:
            return _Kind(STORAGES[name])
        if module == "torch" and name in DTYPES:
            return _Kind(DTYPES[name])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _Kind(np.dtype(np.uint8))
        if module == "torch" and name.endswith("Storage"):
            raise pickle.UnpicklingError(f"it stores tensors as {name}, which is not supported")
        if module == "torch._utils":
            raise pickle.UnpicklingError(f"it holds a kind of tensor that is not supported ({name})")
        raise pickle.UnpicklingError(f"its pickle asks for {module}.{name}, which weights have no need of")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Kind(dtype=dtype), str(key), _, int(size)) if size >= 0:
                return _Storage(key, dtype, size)
            case ("storage", _Kind(dtype=dtype), str(key), _, int(size), None) if size >= 0:
                return _Storage(key, dtype, size)
        raise pickle.UnpicklingError("it describes a storage in a way that is not supported")


class _Plain(pickle.Unpickler):
    """An unpickler for the numbers, strings, lists and dicts around the state dict of the older form."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"its pickle asks for {module}.{name}, which weights have no need of")


def read_torch_bin(file: MappedFile) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a state dict by name, unread, and no metadata."""
    path = file.path
    try:
        return (_read_zip(file) if file.buffer[:4] == ZIP_MAGIC else _read_legacy(file)), {}
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"'{path}' was not read: {error}; nothing in it was executed.") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"'{path}' is truncated or damaged: download it again.") from error
    except Exception as error:  # a damaged pickle may raise anything at all
        raise CheckpointError(
            f"'{path}' is damaged or not a state dict of PyTorch ({type(error).__name__}: {error}); "
            "nothing in it was executed."
        ) from error


def _read_zip(file: MappedFile) -> dict[str, Tensor]:
    with zipfile.ZipFile(file.path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"'{file.path}' is a zip file but not one that torch.save wrote: it has no data.pkl.")
        prefix = pickles[0].removesuffix("data.pkl")
        names = set(archive.namelist())
        if prefix + "byteorder" in names and archive.read(prefix + "byteorder") != b"little":
            raise CheckpointError(f"'{file.path}' was written on a big-endian machine: save it again on another.")
        state = _Restricted(BytesIO(archive.read(pickles[0])), encoding="utf-8").load()
        places: Places = {}
        for _, tensor in _tensors(file, state):
            key = tensor.storage.key
            if key in places:
                continue
            if f"{prefix}data/{key}" not in names:
                raise CheckpointError(f"'{file.path}' is damaged: its storage '{key}' is missing.")
            info = archive.getinfo(f"{prefix}data/{key}")
            if info.compress_type == zipfile.ZIP_STORED:
                places[key] = (file.buffer, _start_of(file, info), info.file_size)
            else:  # torch never compresses; others who pack the archive again do
                raw = archive.read(info)
                places[key] = (raw, 0, len(raw))
    return {name: _resolve(file, name, tensor, places) for name, tensor in _tensors(file, state)}


def _start_of(file: MappedFile, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a zip entry begin: its local header has a name and a padding of its own length."""
    header = file.buffer[info.header_offset : info.header_offset + 30]
    start = info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if header[:4] != ZIP_MAGIC or start + info.file_size > file.size:
        raise CheckpointError(f"'{file.path}' is truncated or damaged at '{info.filename}': download it again.")
    return start


def _read_legacy(file: MappedFile) -> dict[str, Tensor]:
    with open(file.path, "rb") as stream:
        try:
            magic = _Plain(stream).load()
        except Exception as error:
            raise CheckpointError(
                f"'{file.path}' is not a PyTorch checkpoint: it is neither its zip form nor its pickle form."
            ) from error
        if magic != LEGACY_MAGIC or _Plain(stream).load() != LEGACY_PROTOCOL:
            raise CheckpointError(f"'{file.path}' is a pickle but not one that torch.save wrote.")
        if not _Plain(stream).load().get("little_endian", True):
            raise CheckpointError(f"'{file.path}' was written on a big-endian machine: save it again on another.")
        state = _Restricted(stream, encoding="utf-8").load()
        keys = _Plain(stream).load()
        position = stream.tell()
    storages = {tensor.storage.key: tensor.storage for _, tensor in _tensors(file, state)}
    places: Places = {}
    for key in keys:  # each: its length in elements as 8 bytes, then its bytes
        if key not in storages:
            raise CheckpointError(f"'{file.path}' holds a storage ('{key}') that belongs to no tensor.")
        length = storages[key].size * storages[key].dtype.itemsize
        stated = int.from_bytes(file.buffer[position : position + 8], "little")
        if position + 8 + length > file.size or stated != storages[key].size:
            raise CheckpointError(f"'{file.path}' is truncated or damaged at its storage '{key}': download it again.")
        places[key] = (file.buffer, position + 8, length)
        position += 8 + length
    return {name: _resolve(file, name, tensor, places) for name, tensor in _tensors(file, state)}


def _tensors(file: MappedFile, state: Any) -> list[tuple[str, _Strided]]:
    if not isinstance(state, dict):
        raise CheckpointError(f"'{file.path}' holds {type(state).__name__}, not a mapping of names to tensors.")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, _Strided) or not isinstance(value.storage, _Storage):
            inside = "; its weights seem to be inside it: save that mapping alone" if isinstance(value, dict) else ""
            raise CheckpointError(
                f"'{file.path}' is not a flat mapping of names to tensors: {name!r} is {type(value).__name__}{inside}."
            )
    return list(state.items())


def _resolve(file: MappedFile, name: str, tensor: _Strided, places: Places) -> Tensor:
    """Return the tensor with its bytes found and its bounds checked."""
    shape, strides, offset, dtype = tensor.shape, tensor.strides, tensor.offset, tensor.dtype
    whole = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if not whole or not all(type(number) is int and number >= 0 for number in (*shape, *strides, offset)):
        raise CheckpointError(f"'{file.path}' is damaged: the shape or strides of '{name}' are malformed.")
    if tensor.storage.key not in places:
        raise CheckpointError(f"'{file.path}' is damaged: the storage of '{name}' is missing.")
    buffer, start, length = places[tensor.storage.key]
    count = math.prod(shape)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if count else 0
    if (offset + reach) * dtype.itemsize > length or count * dtype.itemsize > MAX_BYTES:
        raise CheckpointError(f"'{file.path}' is truncated or damaged: '{name}' reaches beyond its storage.")
    return Tensor(shape, dtype, partial(view, buffer, start + offset * dtype.itemsize, shape, dtype, strides))
