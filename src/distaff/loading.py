"""From a checkpoint's tensors to parameters: names matched, coverage checked, then row by row onto the devices."""

import copy
import dataclasses
import json
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from distaff.core.errors import CheckpointError, UsageError, listed
from distaff.core.precision import is_floating
from distaff.core.tree import Tree, flatten
from distaff.hub import resolve
from distaff.weights import STATISTICS, Leaf, Row, Tie, matches, random_tensor, shape_in_file, to_ours

logger = logging.getLogger(__name__)

# Buffers from this size on are mapped on their own and offered to huge pages: a fault a page is half of the time of
# reading otherwise.
_LARGE = 1 << 21
# XLA on CPU takes a host buffer over without a copy if it is aligned to this many bytes.
_ALIGNMENT = 64
# Columns that are laid out together when a matrix is transposed: a cache line of float32.
_STRIP = 16
# Keywords of Transformers' `from_pretrained` that mean nothing here, and why.
REFUSED = {
    "from_pt": "files of PyTorch are read as they are; leave it out",
    "torch_dtype": "dtype is that of the computation, param_dtype that of the parameters",
}


@dataclass(frozen=True)
class LoadingReport:
    """What a checkpoint and a model did not share, by the names that PyTorch uses.

    `new` tensors were made at random for heads that the checkpoint lacks, `unused` ones stand in the checkpoint and
    have no place in the model, `mismatched` ones had another shape and were made at random because
    `ignore_mismatched_sizes` was given.
    """

    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    def log(self, name: str, source: str) -> None:
        """Warn of what is not as it was saved."""
        if self.new:
            logger.warning("%s: '%s' lacks %s; made at random, train them before use.", name, source, listed(self.new))
        if self.mismatched:
            logger.warning("%s: of another shape in '%s', made anew: %s.", name, source, listed(self.mismatched))
        if self.unused:
            logger.warning("%s: not used from '%s': %s.", name, source, listed(self.unused))


@dataclass(frozen=True)
class FamilyNames:
    """What matching names needs to know of a family.

    `prefix` is the name of the base model inside a headed one, `is_base` whether the model is the base itself,
    `base_rows` all rows of the base model without the prefix, `ignored` patterns of keys without meaning for us.
    """

    prefix: str
    is_base: bool
    base_rows: tuple[Row, ...] = ()
    ignored: tuple[str, ...] = ()


class _FileNames:
    """The names in a file, found with or without the base model's prefix."""

    def __init__(self, checkpoint, family: FamilyNames):
        self.format = checkpoint.format
        self.names = set(checkpoint.keys())
        # Old Flax wrote a model that holds more than parameters by its collections.
        heads = tuple(f"{collection}/" for collection in ("params", STATISTICS))
        collected = self.format == "msgpack" and all(name.startswith(heads) for name in self.names)
        self.stored = {name.partition("/")[2] if collected else name: name for name in self.names}
        self.separator = "/" if self.format == "msgpack" else "."
        self.family = family
        self.start = f"{family.prefix}{self.separator}"
        self.prefixed = bool(family.prefix) and any(name.startswith(self.start) for name in self.stored)

    def find(self, row: Row) -> str | None:
        """Return the name under which the file holds `row`, or None."""
        return next(
            (self.stored[name] for name in map(self._in_file, row.names(self.format)) if name in self.stored), None
        )

    def _in_file(self, name: str) -> str:
        if not self.family.prefix:
            return name
        if self.family.is_base:
            return f"{self.start}{name}" if self.prefixed else name
        return name if self.prefixed else name.removeprefix(self.start)

    def strangers(self, left_over: set[str]) -> list[str]:
        """Return those left-over names that lie inside the base model and that no such model has."""
        rows = [row.layer(index) for row in self.family.base_rows for index in range(row.count or 1)]
        known = {name for row in rows for name in row.names(self.format)}
        parts = {name.split(self.separator)[0] for name in known}

        def stranger(name: str) -> bool:
            inner = name.removeprefix(self.start)
            inside = name.startswith(self.start) if self.prefixed else inner.split(self.separator)[0] in parts
            return inside and inner not in known

        return sorted(name for bare, name in self.stored.items() if name in left_over and stranger(bare))


def is_untied(checkpoint, ties: tuple[Tie, ...], family: FamilyNames) -> bool:
    """Tell whether the file holds both tensors of a tie with different values, which makes them two parameters."""
    names = _FileNames(checkpoint, family)
    for tie in ties:
        head_name = names.find(Row(tie.key, "", "linear", ()))
        table_name = names.find(Row(tie.source, "", "embedding", ()))
        if head_name is None or table_name is None:
            continue
        head, table = checkpoint[head_name], checkpoint[table_name]
        head = head.T if checkpoint.format == "msgpack" else head
        if head.shape != table.shape or not np.array_equal(head, table):
            return True
    return False


def load_params(
    checkpoint,
    table: Mapping[str, Leaf],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    family: FamilyNames,
    ties: tuple[Tie, ...] = (),
    seed: int = 0,
    initializer_range: float = 0.02,
    ignore_mismatched_sizes: bool = False,
    sharding: Callable[[Leaf, tuple[int, ...]], NamedSharding | None] = lambda leaf, shape: None,
    vocab: int | None = None,
) -> tuple[dict[str, Any], LoadingReport]:
    """Return parameters by path, in the dtypes of `shapes`, and what did not match.

    Where `shapes` have more than `vocab` entries on an axis of the vocabulary, those behind are zeros.

    Raises `CheckpointError` that lists every missing, left-over or misshapen tensor of the base model at once.
    """
    filled = {path: table[path].filled(shape.shape, vocab) for path, shape in shapes.items()}
    found, report = _match(checkpoint, table, filled, family, ties, ignore_mismatched_sizes)

    def read(path: str):
        leaf, shape = table[path], shapes[path]
        host = _host_array(leaf, shape, vocab, found, checkpoint, seed, initializer_range)
        return _on_devices(host, sharding(leaf, shape.shape))

    # Copies release the interpreter lock; two at a time keep a laptop's memory bus busy.
    with ThreadPoolExecutor(max_workers=2) as pool:
        params = dict(zip(table, pool.map(read, table)))
    return params, report


def random_params(
    table: Mapping[str, Leaf],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seed: int,
    initializer_range: float,
    sharding: Callable[[Leaf, tuple[int, ...]], NamedSharding | None] = lambda leaf, shape: None,
    vocab: int | None = None,
) -> dict[str, Any]:
    """Return random parameters by path, each a function of the seed and its row alone; `vocab` as in `load_params`."""

    def make(path: str):
        leaf, shape = table[path], shapes[path]
        host = _host_array(leaf, shape, vocab, {}, None, seed, initializer_range)
        return _on_devices(host, sharding(leaf, shape.shape))

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(table, pool.map(make, table)))


def _match(checkpoint, table, shapes, family, ties, ignore_mismatched_sizes) -> tuple[dict[str, str], LoadingReport]:
    """Return which file name each row's key is read from, and the report."""
    names = _FileNames(checkpoint, family)
    found: dict[str, str] = {}
    missing: list[str] = []
    new: list[str] = []
    wrong: list[str] = []
    mismatched: list[str] = []
    for leaf in table.values():
        want = shapes[leaf.path][1:] if leaf.stacked else shapes[leaf.path]
        for row in leaf.rows:
            name = names.find(row)
            if name is None:
                if row.kind != "count":  # says nothing of the model; old files lack it
                    (missing if row.required else new).append(row.key)
                continue
            expected = shape_in_file(tuple(want), row.kind, checkpoint.format)
            if tuple(checkpoint.shape(name)) == expected:
                found[row.key] = name
            elif ignore_mismatched_sizes:
                mismatched.append(row.key)
            else:
                wrong.append(f"{row.key} ({leaf.path}): file {tuple(checkpoint.shape(name))}, model {expected}")
    _refuse_unlike(checkpoint, names, table)
    left_over = _left_over(names, table, ties, family)
    _refuse(checkpoint, missing, wrong, names.strangers(left_over))
    return found, LoadingReport(tuple(new), tuple(sorted(left_over)), tuple(mismatched))


def _refuse_unlike(checkpoint, names: _FileNames, table) -> None:
    """Raise `CheckpointError` where a file has one tensor of ours under several names, with different values."""
    for row in (row for leaf in table.values() for row in leaf.rows if row.repeats):
        each = [names.find(Row(key, "", row.kind, ())) for key in (row.key, *row.repeats)]
        found = [name for name in each if name]
        unlike = [name for name in found[1:] if not np.array_equal(checkpoint[found[0]], checkpoint[name])]
        if unlike:
            raise CheckpointError(
                f"{found[0]} and {listed(unlike)} of {listed(map(str, checkpoint.files), 3)} differ and are one tensor "
                "here: convert the checkpoint with PyTorch, or keep the right one alone."
            )


def _left_over(names: _FileNames, table, ties, family) -> set[str]:
    used: set[str] = set()
    for leaf in table.values():
        for row in leaf.rows:
            each = [Row(key, "", row.kind, ()) for key in (row.key, *row.aliases, *row.copies, *row.repeats)]
            used.update(name for name in map(names.find, [row, *each]) if name)
    used.update(name for name in (names.find(Row(tie.key, "", "linear", ())) for tie in ties) if name)
    return {name for name in names.names - used if not matches(family.ignored, name)}


def _refuse(checkpoint, missing, wrong, strangers) -> None:
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing: {listed(missing)}")
    if wrong:
        faults.append(f"{len(wrong)} of another shape: {listed(wrong)}")
    if strangers:
        faults.append(f"{len(strangers)} without a place in the model: {listed(strangers)}")
    if not faults:
        return
    remedy = "compare the config with the checkpoint"
    if wrong and not missing and not strangers:
        remedy += "; in Python ignore_mismatched_sizes=True starts those anew"
    files = listed((str(file) for file in checkpoint.files), 3)
    raise CheckpointError(f"The tensors of {files} do not fit the model; {'; '.join(faults)}. Remedy: {remedy}.")


def _host_array(leaf, shape, vocab, found, checkpoint, seed, initializer_range) -> np.ndarray:
    """Return the leaf as a host array of our layout, read where the file has it and random where not."""
    out = _buffer(shape.shape, np.dtype(shape.dtype))
    inside: tuple[Any, ...] = (..., *map(slice, leaf.filled(shape.shape, vocab)))  # with the dots, always a view
    filled = out[inside]
    if filled.shape != out.shape:
        out[...] = 0
    for index, row in enumerate(leaf.rows):
        target = filled[index] if leaf.stacked else filled
        name = found.get(row.key)
        if name is None:
            np.copyto(target, random_tensor(row, target.shape, seed, initializer_range), casting="unsafe")
        else:
            _copy(target, to_ours(checkpoint[name], row.kind, checkpoint.format))
    return out


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy and cast; a transposed view in strips of columns, which is twice as fast as at once."""
    if source.ndim != 2 or source.flags.c_contiguous:
        np.copyto(target, source, casting="unsafe")
        return
    for start in range(0, source.shape[1], _STRIP):
        strip = slice(start, start + _STRIP)
        np.copyto(target[:, strip], source[:, strip], casting="unsafe")


def _buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array that XLA on CPU can take over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    if size >= _LARGE:
        # Private: memory that could be shared with other processes gets no huge pages.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        pages = mmap.mmap(-1, size, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, dtype, count=int(np.prod(shape))).reshape(shape)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _on_devices(host: np.ndarray, sharding: NamedSharding | None):
    if sharding is None:
        return jax.device_put(host)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def read_config(folder: Path, model_class) -> Any:
    """Return the config of `folder` for `model_class`. Raises `CheckpointError` for none, or another family's."""
    if not (folder / "config.json").is_file():
        found = listed(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise CheckpointError(
            f"'{folder}' has no config.json (it holds {found}): name a folder that a model was saved in."
        )
    config_class = model_class.config_class
    values = config_values(folder)
    wanted = (config_class.model_type, *model_class.compatible_model_types)
    if values.get("model_type", wanted[0]) not in wanted:
        raise CheckpointError(
            f"'{folder}' holds a '{values['model_type']}' model, and {model_class.__name__} loads '{wanted[0]}': "
            "use the class of that family, or FlaxAutoModel."
        )
    try:
        return config_class.from_dict(values)
    except Exception as error:  # each config class raises its own
        reason = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(f"'{folder / 'config.json'}' is not a config that opens: {reason}.") from error


def config_values(folder: Path) -> dict[str, Any]:
    """Return the fields in the `config.json` of `folder`. Raises `CheckpointError` where it holds none."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' is not a readable config ({error}): write it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' holds a {type(values).__name__} and no config's fields: write it again.")
    return values


def refuse_misfits(params: Any, shape_tree: Tree, *, name: str) -> None:
    """Raise `UsageError` with all the leaves of `params` that do not fit the model `name`, whose shapes are given."""
    if not isinstance(params, Mapping):
        raise UsageError(f"Parameters are nested dicts of arrays, and this is a {type(params).__name__}.")
    given, shapes = flatten(params), flatten(shape_tree)
    missing, extra = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    both = [(path, given[path], shape) for path, shape in shapes.items() if path in given]
    wrong = [
        f"{path} {tuple(np.shape(leaf))} instead of {tuple(shape.shape)}"
        for path, leaf, shape in both
        if np.shape(leaf) != tuple(shape.shape)
    ]
    no_floats = [
        f"{path} {getattr(leaf, 'dtype', type(leaf).__name__)}"
        for path, leaf, shape in both
        if is_floating(shape) and not (hasattr(leaf, "dtype") and is_floating(leaf))
    ]
    if missing or extra or wrong or no_floats:
        parts = [
            ("missing", missing),
            ("unknown", extra),
            ("misshapen", wrong),
            ("without floating numbers", no_floats),
        ]
        faults = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in parts if names)
        raise UsageError(f"These are not the parameters of {name}: {faults}.")


def configure(folder: Path, config, overrides: Mapping[str, Any], *, model_class) -> tuple[Any, dict[str, Any]]:
    """Return a config of our own, changed by those overrides that it knows, and the rest: fields of the module."""
    for name, reason in REFUSED.items():
        if name in overrides:
            raise UsageError(f"{name} is not needed: {reason}.")
    if isinstance(config, str | os.PathLike):
        folder, config = resolve(config, weights=False), None
    config = copy.deepcopy(read_config(folder, model_class) if config is None else config)
    # Old configs hold gradient_checkpointing, which means nothing there.
    of_module = {field.name for field in dataclasses.fields(model_class.module_class)}
    fields = {}
    for name, value in overrides.items():
        if hasattr(config, name) and name not in of_module:
            setattr(config, name, value)
        else:
            fields[name] = value
    return config, fields
