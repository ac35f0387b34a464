"""Tensors and their bytes: weight files mapped into memory, read when asked for, and arrays as bytes to write."""

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from distaff.core.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a weight file whose bytes have not been read: `read()` returns it as a read-only array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class MappedFile:
    """A weight file mapped read-only. Empty files, git-lfs pointers and web pages are refused by name.

    Views keep the mapping alive; replacing the file by renaming another over it does not disturb them.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = path.stat().st_size
                if self.size == 0:
                    raise CheckpointError(f"'{path}' is empty: download or save it again.")
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"Cannot read '{path}': {error.strerror or error}.") from error
        self._refuse_stand_in()

    def _refuse_stand_in(self) -> None:
        head = self.buffer[:256]
        if head.startswith(LFS_POINTER):
            raise CheckpointError(
                f"'{self.path}' is a git-lfs pointer, not the weights: run `git lfs pull` in the folder it came from."
            )
        if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
            raise CheckpointError(f"'{self.path}' is a web page, not weights: download the file itself again.")

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        """Return the tensor that lies at byte `offset` in row-major order, unread; its bounds are checked before."""
        return Tensor(shape, dtype, lambda: view(self.buffer, offset, shape, dtype))

    def release(self) -> None:
        """Let the system take back the pages read so far; views stay valid and are read again from the page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED)


def view(
    buffer: mmap.mmap | bytes,
    offset: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    strides: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Return a read-only view of `buffer` from byte `offset` on; `strides` are in elements, row-major by default."""
    if 0 in shape:
        array = np.empty(shape, dtype)
    elif strides is None:
        array = np.frombuffer(buffer, dtype, math.prod(shape), offset).reshape(shape)
    else:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        steps = tuple(stride * dtype.itemsize for stride in strides)
        array = np.lib.stride_tricks.as_strided(np.frombuffer(buffer, dtype, reach, offset), shape, steps)
    array.flags.writeable = False
    return array


def dtype_named(name: str) -> np.dtype | None:
    """Return the numeric dtype that numpy or ml_dtypes ("bfloat16", "float8_e5m2") calls `name`, or None."""
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return None
    return dtype if dtype.kind in "biufc" or hasattr(ml_dtypes, dtype.name) else None


def raw_bytes(tensor: Any) -> memoryview:
    """Return the little-endian bytes of an array in row-major order, copied only if they are not laid out so."""
    array = np.asarray(tensor)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data
