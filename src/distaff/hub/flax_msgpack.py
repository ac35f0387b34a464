"""One `flax_model.msgpack` file: the format of `flax.serialization.to_bytes`, read as views and written in a stream.

The file is a msgpack map of maps. A leaf is an extension: 1 an array, 2 a complex number, 3 a numpy scalar. The payload
of 1 and 3 is a msgpack array (shape, dtype name, bytes). An array over 1 GiB is a map of flat pieces. The msgpack
package would copy every tensor to find where the next one begins, so the few tags that occur are walked here.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from distaff.core.errors import CheckpointError
from distaff.core.tree import flatten, unflatten
from distaff.hub.mapped import MappedFile, Tensor, dtype_named, raw_bytes

CHUNKED = "__msgpack_chunked_array__"
CHUNK_BYTES = 2**30  # Flax's limit; msgpack's own is 2**32 - 1 a leaf
MAX_DEPTH = 64  # no model nests deeper; a damaged file may

# Tags followed by a number: its struct format.
NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# Tags followed by a length of 1, 2 or 4 bytes, with the kind of what follows it.
SIZED = {tag: ("bin", width) for tag, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4))}
SIZED |= {tag: ("ext", width) for tag, width in ((0xC7, 1), (0xC8, 2), (0xC9, 4))}
SIZED |= {tag: ("str", width) for tag, width in ((0xD9, 1), (0xDA, 2), (0xDB, 4))}
SIZED |= {0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)}


def read_flax_msgpack(file: MappedFile) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, unread, by their '/'-paths, and no metadata."""
    path = file.path
    walk = _Walk(file)
    try:
        tree = walk.value()
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise CheckpointError(
            f"'{path}' is truncated or damaged at byte {walk.position:,}: download it again."
        ) from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"'{path}' is not a Flax checkpoint: it holds {type(tree).__name__}, not named tensors.")
    if walk.position != file.size:
        raise CheckpointError(f"'{path}' is damaged: {file.size - walk.position:,} bytes follow its last tensor.")
    flat = flatten(tree)
    strays = [name for name, leaf in flat.items() if not isinstance(leaf, Tensor)]
    if strays:
        raise CheckpointError(f"'{path}' holds {type(flat[strays[0]]).__name__} instead of a tensor at '{strays[0]}'.")
    return flat, {}


class _Walk:
    """A position in the file that moves over one msgpack value after another."""

    def __init__(self, file: MappedFile):
        self.file = file
        self.position = 0
        self.depth = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.file.buffer, self.position)
        self.position += struct.calcsize(form)
        return value

    def take(self, length: int) -> int:
        """Step over `length` bytes and return where they begin."""
        begin = self.position
        if begin + length > self.file.size:
            raise CheckpointError(
                f"'{self.file.path}' is truncated: {begin + length:,} bytes are needed and it has {self.file.size:,}; "
                "download or save it again."
            )
        self.position += length
        return begin

    def head(self) -> tuple[str, Any]:
        """Return the kind of the next value, and its length or, for plain values, itself."""
        tag = self.number(">B")
        for low, high, kind in ((0x80, 0x8F, "map"), (0x90, 0x9F, "array"), (0xA0, 0xBF, "str")):
            if low <= tag <= high:
                return kind, tag - low
        if tag in SIZED:
            kind, width = SIZED[tag]
            return kind, self.number({1: ">B", 2: ">H", 4: ">I"}[width])
        if tag in NUMBERS:
            return "plain", self.number(NUMBERS[tag])
        if tag in CONSTANTS:
            return "plain", CONSTANTS[tag]
        if 0xD4 <= tag <= 0xD8:
            return "ext", 1 << (tag - 0xD4)
        if tag == 0xC1:
            raise CheckpointError(f"'{self.file.path}' is damaged or not a msgpack file (byte {self.position - 1:,}).")
        return "plain", tag if tag < 0x80 else tag - 0x100

    def value(self) -> Any:
        kind, size = self.head()
        if kind == "plain":
            return size
        if kind in ("str", "bin"):
            begin = self.take(size)
            raw = self.file.buffer[begin : self.position]
            return raw.decode() if kind == "str" else raw
        if kind == "ext":
            return self.extension(size)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CheckpointError(f"'{self.file.path}' is damaged: it nests over {MAX_DEPTH} levels deep.")
        filled: Any
        if kind == "array":
            filled = [self.value() for _ in range(size)]
        else:
            filled = {str(self.value()): self.value() for _ in range(size)}
            if filled.get(CHUNKED) is True:
                filled = _join(filled, self.file.path)
        self.depth -= 1
        return filled

    def extension(self, size: int) -> Tensor:
        code = self.number(">b")
        begin = self.take(size)
        end = self.position
        self.position = begin
        if code == 2:
            array = np.array(complex(*msgpack.unpackb(self.file.buffer[begin:end])))
            self.position = end
            return Tensor((), array.dtype, lambda: array)
        if code not in (1, 3) or self.head() != ("array", 3):
            raise CheckpointError(f"'{self.file.path}' holds an unknown extension (code {code}) at byte {begin:,}.")
        shape, name = self.value(), self.value()
        name = name.decode() if isinstance(name, bytes) else name
        kind, length = self.head()
        dtype = dtype_named(name) if isinstance(name, str) else None
        whole = isinstance(shape, list) and all(type(extent) is int and extent >= 0 for extent in shape)
        if dtype is None:
            raise CheckpointError(f"'{self.file.path}' stores a tensor as {name!r}, which is not a numeric dtype.")
        if not whole or kind not in ("bin", "str") or self.position + length != end:
            raise CheckpointError(f"'{self.file.path}' is damaged: the tensor at byte {begin:,} is malformed.")
        if math.prod(shape) * dtype.itemsize != length:
            raise CheckpointError(
                f"'{self.file.path}' is damaged: a tensor of shape {tuple(shape)} and dtype {name} "
                f"at byte {begin:,} cannot take {length:,} bytes."
            )
        return self.file.tensor(self.take(length), tuple(shape), dtype)


def _join(pieces: dict[str, Any], path: Path) -> Tensor:
    """Return the tensor that was written in flat pieces."""
    try:
        shape = tuple(pieces["shape"][str(axis)] for axis in range(len(pieces["shape"])))
        parts = [pieces["chunks"][str(index)] for index in range(len(pieces["chunks"]))]
        whole = parts and sum(part.shape[0] for part in parts) == math.prod(shape)
    except (KeyError, TypeError, AttributeError, IndexError):
        whole = False
    if not whole:
        raise CheckpointError(f"'{path}' is damaged: the pieces of a chunked tensor do not fit together.")

    def read() -> np.ndarray:
        joined = np.concatenate([part.read() for part in parts]).reshape(shape)
        joined.flags.writeable = False
        return joined

    return Tensor(shape, parts[0].dtype, read)


def write_flax_msgpack(file: BinaryIO, tensors: Sequence[tuple[str, Any]]) -> None:
    """Write `('/'-path, array)` pairs, byte for byte as `flax.serialization.to_bytes` writes the nested dict."""
    for path, tensor in tensors:
        if dtype_named(np.dtype(tensor.dtype).name) is None:
            raise CheckpointError(
                f"A Flax checkpoint has no dtype for '{path}', which is {tensor.dtype}: cast it first."
            )
    _write_map(file, unflatten(dict(tensors)))


def _write_map(file: BinaryIO, tree: dict[str, Any]) -> None:
    packer = msgpack.Packer()
    file.write(packer.pack_map_header(len(tree)))
    for key, leaf in tree.items():
        file.write(packer.pack(key))
        (_write_map if isinstance(leaf, dict) else _write_array)(file, leaf)


def _write_array(file: BinaryIO, tensor: Any) -> None:
    dtype, count = np.dtype(tensor.dtype).newbyteorder("="), math.prod(tensor.shape)
    if count * dtype.itemsize <= CHUNK_BYTES:
        return _write_extension(file, tuple(tensor.shape), dtype.name, raw_bytes(tensor))
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    starts = range(0, count, step)
    packer = msgpack.Packer()
    shape = {str(axis): extent for axis, extent in enumerate(tensor.shape)}
    file.write(packer.pack_map_header(3) + packer.pack(CHUNKED) + packer.pack(True))
    file.write(packer.pack("shape") + packer.pack(shape) + packer.pack("chunks") + packer.pack_map_header(len(starts)))
    raw = raw_bytes(tensor)
    for index, start in enumerate(starts):
        piece = raw[start * dtype.itemsize : (start + step) * dtype.itemsize]
        file.write(packer.pack(str(index)))
        _write_extension(file, (piece.nbytes // dtype.itemsize,), dtype.name, piece)
    return None


def _write_extension(file: BinaryIO, shape: tuple[int, ...], dtype_name: str, raw: memoryview) -> None:
    packer = msgpack.Packer()
    inner = packer.pack_array_header(3) + packer.pack(shape) + packer.pack(dtype_name)
    inner += _sized_head("bin", raw.nbytes)
    length = len(inner) + raw.nbytes
    fixed = {1 << power: 0xD4 + power for power in range(5)}
    head = bytes([fixed[length]]) if length in fixed else _sized_head("ext", length)
    file.write(head + b"\x01" + inner)
    file.write(raw)


def _sized_head(kind: str, length: int) -> bytes:
    for tag, (named, width) in SIZED.items():
        if named == kind and length < 256**width:
            return bytes([tag]) + length.to_bytes(width, "big")
    raise CheckpointError(f"A single msgpack leaf cannot hold {length:,} bytes.")
