"""The weight files of a folder: opening them as one lazily read mapping, and saving them.

`open_checkpoint` takes the first that exists of safetensors, PyTorch and Flax files, each single or sharded. A chosen
file that is broken is an error; no other format is taken in its place.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from distaff.core.errors import CheckpointError, DistaffError, UsageError, listed
from distaff.hub.flax_msgpack import read_flax_msgpack, write_flax_msgpack
from distaff.hub.mapped import MappedFile, Tensor
from distaff.hub.safetensors_file import read_safetensors, write_safetensors
from distaff.hub.torch_bin import read_torch_bin

Format = Literal["safetensors", "bin", "msgpack"]
SINGLE: dict[Format, str] = {
    "safetensors": "model.safetensors",
    "bin": "pytorch_model.bin",
    "msgpack": "flax_model.msgpack",
}
READERS: dict[Format, Callable[[MappedFile], tuple[dict[str, Tensor], dict[str, str]]]] = {
    "safetensors": read_safetensors,
    "bin": read_torch_bin,
    "msgpack": read_flax_msgpack,
}
INDEX_SUFFIX = ".index.json"
# In the order of preference.
WEIGHT_NAMES = tuple(name for single in SINGLE.values() for name in (single, single + INDEX_SUFFIX))

# Mapped pages count as memory of the process until they are released: the bytes handed out between two releases.
RELEASE_BYTES = 32_000_000

SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder by name, read when asked for.

    A tensor is a read-only view of its mapped file wherever the file holds it in one piece; it stays valid for as long
    as it is referenced. Names are those of the file: PyTorch's for "safetensors" and "bin", '/'-paths for "msgpack".
    """

    def __init__(
        self, tensors: dict[str, Tensor], *, format: Format, files: Iterable[MappedFile], metadata: dict[str, str]
    ):
        self._tensors = tensors
        self._mapped = tuple(files)
        self._handed_out = 0
        self.format: Format = format
        self.files = tuple(file.path for file in self._mapped)
        self.metadata = metadata

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        if self._handed_out > RELEASE_BYTES:
            for file in self._mapped:
                file.release()
            self._handed_out = 0
        array = tensor.read()
        self._handed_out += array.nbytes
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype that a tensor is stored in, without reading it."""
        return self._tensors[name].dtype


def open_checkpoint(folder: str | os.PathLike[str], *, name: str | None = None) -> Checkpoint:
    """Open the weights in `folder`: the file or index called `name`, or the first of `WEIGHT_NAMES` that is there.

    Headers, indexes and sizes are checked now, tensors are read later. Raises `CheckpointError`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        state = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"The checkpoint folder '{folder}' {state}: name the folder that holds the weights.")
    looked_for = WEIGHT_NAMES if name is None else (name,)
    chosen = next((candidate for candidate in looked_for if (folder / candidate).is_file()), None)
    if chosen is None:
        raise CheckpointError(f"'{folder}' holds no weights: looked for {', '.join(looked_for)}.")
    suffix = Path(chosen.removesuffix(INDEX_SUFFIX)).suffix.removeprefix(".")
    format = next((known for known in SINGLE if known == suffix), None)
    if format is None:
        raise CheckpointError(
            f"'{folder / chosen}' is in no known format: name a .{', a .'.join(SINGLE)} or its index."
        )
    if chosen.endswith(INDEX_SUFFIX):
        return _open_sharded(folder / chosen, format)
    file = MappedFile(folder / chosen)
    tensors, metadata = READERS[format](file)
    return Checkpoint(tensors, format=format, files=[file], metadata=metadata)


def _open_sharded(index: Path, format: Format) -> Checkpoint:
    weight_map = _weight_map(index)
    folder, names = index.parent, sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"'{folder}' lacks {listed(missing)}, which {index.name} names ({len(missing)} of {len(names)} shards)."
        )
    files, tensors, metadata = [], {}, {}
    absent = []
    for name in names:
        file = MappedFile(folder / name)
        held, shard_metadata = READERS[format](file)
        files.append(file)
        metadata.update(shard_metadata)
        absent += [f"{tensor} ({name})" for tensor, shard in weight_map.items() if shard == name and tensor not in held]
        for tensor in held:
            if weight_map.get(tensor, name) != name:
                continue  # the index decides between two copies
            if tensor in tensors:
                raise CheckpointError(f"'{folder}' holds '{tensor}' in two shards and {index.name} does not say which.")
            tensors[tensor] = held[tensor]
    if absent:
        raise CheckpointError(
            f"'{index}' names {len(absent)} tensors that are not in the shards it gives: {listed(absent)}."
        )
    return Checkpoint(tensors, format=format, files=files, metadata=metadata)


def _weight_map(index: Path) -> dict[str, str]:
    file = MappedFile(index)  # for its refusals of an empty file, a pointer, a web page
    try:
        weight_map = json.loads(file.buffer[:])["weight_map"]
        whole = bool(weight_map) and all(isinstance(shard, str) for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"'{index}' is not an index of shards: it needs a JSON mapping with a filled 'weight_map'."
        )
    outside = [shard for shard in weight_map.values() if Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"'{index}' names '{outside[0]}', which is not a file name in its own folder.")
    return weight_map


def save_safetensors(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    max_shard_size: int | str = "5GB",
) -> tuple[Path, ...]:
    """Write `name -> array` as `model.safetensors`, or shards with an index beyond `max_shard_size`; return the files.

    Nothing in `folder` changes until all of it is written, and an error leaves what was there. Safetensors files of an
    earlier save are removed at the end. Raises `DistaffError`.
    """

    def write(file: BinaryIO, shard: list[tuple[str, Any]]) -> None:
        write_safetensors(file, shard, {"format": "pt"})

    return _save(Path(folder), tensors, SINGLE["safetensors"], write, parse_size(max_shard_size))


def save_msgpack(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    max_shard_size: int | str = "5GB",
) -> tuple[Path, ...]:
    """Write `'/'-path -> array` as `flax_model.msgpack`, as the Flax classes of Transformers 4 read it.

    Shards, order of events and errors are those of `save_safetensors`.
    """
    return _save(Path(folder), tensors, SINGLE["msgpack"], write_flax_msgpack, parse_size(max_shard_size))


def parse_size(size: int | str) -> int:
    """Return the bytes that 5000, "200MB" or "5GiB" stand for."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if count < 1:
        raise UsageError(f"'{size}' is not a size: give a positive number of bytes, or one such as 200MB or 5GB.")
    return count


def _save(
    folder: Path,
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    single: str,
    write: Callable[[BinaryIO, list[tuple[str, Any]]], None],
    limit: int,
) -> tuple[Path, ...]:
    stem, suffix = os.path.splitext(single)
    temporaries: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shards: list[list[str]] = []
        total = 0
        for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, limit):
            temporaries.append(folder / f".{stem}-{len(shards) + 1:05d}{suffix}.tmp")
            with open(temporaries[-1], "wb") as file:
                write(file, shard)
                _flush(file)
            shards.append([name for name, _ in shard])
            total += sum(_nbytes(tensor) for _, tensor in shard)
        count = len(shards)
        names = [single] if count == 1 else [f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}" for i in range(count)]
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            names.append(single + INDEX_SUFFIX)
            temporaries.append(folder / f".{stem}{suffix}{INDEX_SUFFIX}.tmp")
            with open(temporaries[-1], "wb") as file:
                file.write(json.dumps(index, indent=2).encode())
                _flush(file)
        return _put_in_place(folder, temporaries, names, single)
    except OSError as error:
        raise DistaffError(
            f"Cannot save weights in '{folder}': {error.strerror or error}; make room or choose another folder."
        ) from error
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


def _shards(tensors: Iterable[tuple[str, Any]], limit: int) -> Iterator[list[tuple[str, Any]]]:
    """Split in the order given; a tensor over `limit` has a shard of its own."""
    shard: list[tuple[str, Any]] = []
    size, seen = 0, set()
    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"The weights to save hold '{name}' twice.")
        seen.add(name)
        if shard and size + _nbytes(tensor) > limit:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += _nbytes(tensor)
    if not seen:
        raise CheckpointError("There are no weights to save.")
    yield shard


def _nbytes(tensor: Any) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _put_in_place(folder: Path, temporaries: list[Path], names: list[str], single: str) -> tuple[Path, ...]:
    """Rename complete files to their names, the index last, and remove those of the same kind from earlier saves."""
    stem, suffix = os.path.splitext(single)
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}({re.escape(INDEX_SUFFIX)})?")
    old = {path.name for path in folder.iterdir() if ours.fullmatch(path.name)}
    if old.intersection(names[:-1]):
        # Shards of the same count: stopped half-way, an index would join old and new ones. Without it nothing does.
        (folder / (single + INDEX_SUFFIX)).unlink(missing_ok=True)
    for temporary, name in zip(temporaries, names, strict=True):
        os.replace(temporary, folder / name)
    for name in old.difference(names):
        (folder / name).unlink(missing_ok=True)
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return tuple(folder / name for name in names)
