"""Rows that say everything about a parameter: its Hugging Face name, our path, its kind and its logical axes.

From the same rows come reading and writing of every file format, random initialisation, shardings, the weight-decay
mask and the stacked axis of scanned layers.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from distaff.core.errors import CheckpointError, listed
from distaff.core.tree import STACKED, flatten

Kind = Literal[
    "linear",
    "conv",
    "conv1d",
    "fused_conv1d",
    "embedding",
    "norm_scale",
    "rms_scale",
    "bias",
    "fused_bias",
    "raw",
    "mean",
    "variance",
    "count",
]
# Several dense layers in one: our arrays have an axis of three before the last, which files have joined with it.
_FUSED, _FUSED_KINDS = 3, ("fused_conv1d", "fused_bias")

# How PyTorch calls the last part of a parameter's name, and how Flax does.
_LEAF_NAMES: dict[str, tuple[str, str]] = {
    "linear": ("weight", "kernel"),
    "conv": ("weight", "kernel"),
    "conv1d": ("weight", "kernel"),
    "fused_conv1d": ("weight", "kernel"),
    "embedding": ("weight", "embedding"),
    "norm_scale": ("weight", "scale"),
    "rms_scale": ("weight", "weight"),
    "bias": ("bias", "bias"),
    "fused_bias": ("bias", "bias"),
    "mean": ("running_mean", "mean"),
    "variance": ("running_var", "var"),
}
# What a BatchNorm has seen in training: no parameters, and in a collection of their own.
STATISTICS = "batch_stats"
_STATISTICS_KINDS = ("mean", "variance", "count")
# LayerNorm's parameters in checkpoints that were converted from TensorFlow.
_LEGACY_NORM = {"weight": "gamma", "bias": "beta"}


@dataclass(frozen=True)
class Row:
    """One parameter, or with `{i}` in `key` and `path` one for each of `count` layers.

    `key` is the name in PyTorch files, `path` the '/'-path in our tree, `axes` the logical axes of our array, `kind`
    the transformation between the two. `aliases` are other names under which the tensor may stand in a file, looked
    for in order before `key`; those in `copies` are written too, those in `repeats` are looked for after `key`, are
    never written and must hold the same. `std` is the standard deviation of random weights, None for the config's
    `initializer_range`; an RMSNorm's scale starts at it, or at 1. `required` parameters are never newly made for a
    checkpoint.
    """

    key: str
    path: str
    kind: Kind
    axes: tuple[str | None, ...]
    count: int | None = None
    aliases: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()
    std: float | None = None
    required: bool = True
    collection: str | None = None
    flax_name: str | None = None

    @property
    def flax_key(self) -> str | None:
        """The '/'-path that `flax_model.msgpack` files of Transformers used; None for a count, which they had not."""
        if self.kind == "count":
            return None
        name = _flax_key(self.flax_name or self.key, self.kind)
        return name if self.collection is None else f"{self.collection}/{name}"

    def names(self, file_format: str) -> tuple[str, ...]:
        """The names to look for in a file of that format, in their order and without the collection."""
        if file_format == "msgpack":
            key = self.flax_name or self.key
            return tuple(_flax_key(name, self.kind) for name in (*self.aliases, key, *self.repeats))
        legacy: tuple[str, ...] = ()
        if "norm" in self.key.lower() and self.key.endswith((".weight", ".bias")):
            stem, _, leaf = self.key.rpartition(".")
            legacy = (f"{stem}.{_LEGACY_NORM[leaf]}",)
        return (*self.aliases, self.key, *legacy, *self.repeats)

    def layer(self, index: int) -> "Row":
        """The row of layer `index`."""
        fill = str(index)
        return replace(
            self,
            key=self.key.replace("{i}", fill),
            path=self.path.replace("{i}", fill),
            aliases=tuple(alias.replace("{i}", fill) for alias in self.aliases),
            copies=tuple(copy.replace("{i}", fill) for copy in self.copies),
            flax_name=self.flax_name and self.flax_name.replace("{i}", fill),
            count=None,
        )


def _flax_key(key: str, kind: Kind) -> str:
    stem, _, leaf = key.rpartition(".")
    torch_leaf, flax_leaf = _LEAF_NAMES.get(kind, (leaf, leaf))
    return "/".join([*stem.split("."), flax_leaf if leaf == torch_leaf else leaf]).lstrip("/")


@dataclass(frozen=True)
class Tie:
    """`key` repeats the tensor `source`; where a file holds both with different values, it is a tensor of its own."""

    key: str
    source: str


def linear(key: str, path: str, axes: tuple[str | None, str | None], *, bias: bool = True, **fields: Any) -> list[Row]:
    """Rows of a dense layer: PyTorch stores `[out, in]`, we `[in, out]`."""
    rows = [Row(f"{key}.weight", f"{path}/kernel", "linear", axes, **fields)]
    return rows + ([Row(f"{key}.bias", f"{path}/bias", "bias", (axes[1],), **fields)] if bias else [])


def conv(key: str, path: str, axes: tuple[str | None, ...], *, bias: bool = True, **fields: Any) -> list[Row]:
    """Rows of a convolution: PyTorch stores `[out, in, *window]`, we `[*window, in, out]`; `axes` has them all."""
    rows = [Row(f"{key}.weight", f"{path}/kernel", "conv", axes, **fields)]
    return rows + ([Row(f"{key}.bias", f"{path}/bias", "bias", (axes[-1],))] if bias else [])


def conv1d(key: str, path: str, axes: tuple[str | None, str | None], **fields: Any) -> list[Row]:
    """Rows of GPT-2's dense layer, which PyTorch stores `[in, out]` as we do; old msgpack files have `[out, in]`."""
    bias_fields = {name: value for name, value in fields.items() if name != "std"}
    return [
        Row(f"{key}.weight", f"{path}/kernel", "conv1d", axes, **fields),
        Row(f"{key}.bias", f"{path}/bias", "bias", (axes[1],), **bias_fields),
    ]


def fused_conv1d(key: str, path: str, axes: tuple[str | None, str | None]) -> list[Row]:
    """Rows of three of GPT-2's dense layers in one (`FusedDense`)."""
    return [
        Row(f"{key}.weight", f"{path}/kernel", "fused_conv1d", (axes[0], None, axes[1])),
        Row(f"{key}.bias", f"{path}/bias", "fused_bias", (None, axes[1])),
    ]


def embedding(key: str, path: str, axes: tuple[str | None, str | None], **fields: Any) -> list[Row]:
    """Row of a lookup table `[num_embeddings, features]`."""
    return [Row(f"{key}.weight", f"{path}/embedding", "embedding", axes, **fields)]


def norm(key: str, path: str, **fields: Any) -> list[Row]:
    """Rows of a LayerNorm."""
    return [
        Row(f"{key}.weight", f"{path}/scale", "norm_scale", (None,), **fields),
        Row(f"{key}.bias", f"{path}/bias", "bias", (None,), **fields),
    ]


def batch_norm(key: str, path: str) -> list[Row]:
    """Rows of a BatchNorm: its parameters, and the running statistics with the number of batches in them."""
    return [
        *norm(key, path),
        Row(f"{key}.running_mean", f"{path}/mean", "mean", (None,)),
        Row(f"{key}.running_var", f"{path}/var", "variance", (None,)),
        Row(f"{key}.num_batches_tracked", f"{path}/count", "count", ()),
    ]


def in_collections(rows: Iterable[Row]) -> list[Row]:
    """Rows of a model that holds `{"params": ..., "batch_stats": ...}`, from those of its parts."""

    def inside(row: Row) -> Row:
        collection = STATISTICS if row.kind in _STATISTICS_KINDS else "params"
        return replace(row, path=f"{collection}/{row.path}", collection=collection)

    return [inside(row) for row in rows]


def repeated(count: int, rows: Iterable[Row]) -> list[Row]:
    """Rows for `count` equal layers; their `{i}` stands for the layer's number."""
    return [replace(row, count=count) for row in rows]


def prefixed(prefix: str, rows: Iterable[Row], **fields: Any) -> list[Row]:
    """Rows of a model that is a part, named `prefix`, of another."""

    def inside(row: Row) -> Row:
        def named(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(f"{prefix}.{name}" for name in names)

        others: dict[str, Any] = {name: named(getattr(row, name)) for name in ("aliases", "copies", "repeats")}
        if row.flax_name is not None:
            others["flax_name"] = f"{prefix}.{row.flax_name}"
        changes: dict[str, Any] = {"key": f"{prefix}.{row.key}", "path": f"{prefix}/{row.path}", **others, **fields}
        return replace(row, **changes)

    return [inside(row) for row in rows]


@dataclass(frozen=True)
class Leaf:
    """One array of our tree: its path, and the rows of the tensors that it is made of (several where stacked).

    `repeated`: of a layer that there are several of.
    """

    path: str
    rows: tuple[Row, ...]
    stacked: bool
    repeated: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of all its rows."""
        return self.rows[0].kind

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of the array, "layers" first where stacked."""
        return ("layers", *self.rows[0].axes) if self.stacked else self.rows[0].axes

    def filled(self, shape: tuple[int, ...], vocab: int | None) -> tuple[int, ...]:
        """Return what of an array of `shape` is not padding, where the vocabulary has `vocab` entries."""
        if vocab is None:
            return tuple(shape)
        return tuple(min(size, vocab) if axis == "vocab" else size for size, axis in zip(shape, self.axes))


def leaves(rows: Iterable[Row], *, scan_layers: bool = False) -> dict[str, Leaf]:
    """Return the leaves of the tree by path: a stacked one, or one for each layer."""
    found: dict[str, Leaf] = {}
    for row in rows:
        each = [row] if row.count is None else [row.layer(index) for index in range(row.count)]
        if scan_layers and row.count is not None:
            path = row.path.replace("{i}", STACKED)
            found[path] = Leaf(path, tuple(each), True, True)
        else:
            found.update({one.path: Leaf(one.path, (one,), False, row.count is not None) for one in each})
    return found


def generic_rows(params: Mapping[str, Any]) -> list[Row]:
    """Rows for a module that has none: the path with dots, kernel ↔ weight transposed."""
    rows = []
    if STATISTICS in params:
        return [
            replace(row, path=f"{collection}/{row.path}", collection=collection)
            for collection, tree in params.items()
            for row in generic_rows(tree)
        ]
    for path, leaf in flatten(params).items():
        stem, _, name = path.rpartition("/")
        kinds: dict[str, Kind] = {"kernel": "linear", "embedding": "embedding", "scale": "norm_scale", "bias": "bias"}
        kind = kinds.get(name, "raw")
        if kind == "linear" and len(leaf.shape) != 2:
            kind = "raw"
        key = ".".join([*stem.split("/"), _LEAF_NAMES[kind][0] if kind != "raw" else name]).lstrip(".")
        rows.append(Row(key, path, kind, (None,) * len(leaf.shape)))
    return rows


def _layout(kind: Kind, file_format: str, rank: int) -> tuple[int, ...] | None:
    """Return the order of our axes in a file of that format; None where it is ours."""
    if file_format == "msgpack":
        return (1, 0) if kind in ("conv1d", "fused_conv1d") else None
    # A dense layer is a convolution without a window.
    return (rank - 1, rank - 2, *range(rank - 2)) if kind in ("linear", "conv") else None


def shape_in_file(shape: tuple[int, ...], kind: Kind, file_format: str) -> tuple[int, ...]:
    """Return the shape that an array of our `shape` has in a file of that format."""
    if kind in _FUSED_KINDS:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    order = _layout(kind, file_format, len(shape))
    return shape if order is None else tuple(shape[axis] for axis in order)


def to_ours(tensor: np.ndarray, kind: Kind, file_format: str) -> np.ndarray:
    """Return a view of a file's tensor in our layout."""
    order = _layout(kind, file_format, tensor.ndim)
    tensor = tensor if order is None else tensor.transpose(np.argsort(order))
    return tensor.reshape(*tensor.shape[:-1], _FUSED, -1) if kind in _FUSED_KINDS else tensor


def to_theirs(array: np.ndarray, kind: Kind, file_format: str) -> np.ndarray:
    """Return our array in the file's layout, a view where the numbers are the same."""
    if kind == "count":
        # A whole number in PyTorch; a float here, so that a whole model can be differentiated.
        return array.astype(np.int64)
    if kind in _FUSED_KINDS:
        array = array.reshape(*array.shape[:-2], -1)
    order = _layout(kind, file_format, array.ndim)
    return array if order is None else array.transpose(order)


def tensors_to_write(
    params: Mapping[str, np.ndarray], table: Mapping[str, Leaf], file_format: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield `(name, tensor)` as the file format wants them, from `params` by path."""
    for path, leaf in table.items():
        array = np.asarray(params[path])
        for index, row in enumerate(leaf.rows):
            tensor = to_theirs(array[index] if leaf.stacked else array, row.kind, file_format)
            if file_format == "msgpack":
                if row.flax_key is not None:
                    yield row.flax_key, tensor
            else:
                yield from ((name, tensor) for name in (row.key, *row.copies))


def random_tensor(row: Row, shape: tuple[int, ...], seed: int, initializer_range: float) -> np.ndarray:
    """Return float32 starting values of `shape`, a function of `seed` and the row's path alone.

    Norm scales are 1, biases 0, everything else is normal: the initialisation of BERT and of all that followed it.
    Statistics are those of a BatchNorm that has seen nothing.
    """
    if row.kind == "rms_scale":
        return np.full(shape, 1.0 if row.std is None else row.std, np.float32)
    if row.kind in ("norm_scale", "variance"):
        return np.ones(shape, np.float32)
    if row.kind in ("bias", "fused_bias", "mean", "count"):
        return np.zeros(shape, np.float32)
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(row.path.encode())]))
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(initializer_range if row.std is None else row.std)
    return values


def decays(kind: Kind) -> bool:
    """Tell whether weight decay acts on such parameters: not on biases and norms."""
    return kind not in ("bias", "fused_bias", "norm_scale", "rms_scale", *_STATISTICS_KINDS)


def matrix_axis(leaf: Leaf) -> int:
    """Return the axis of what goes into a kernel of a layer that is repeated, and 0 for all else.

    Else are embeddings, projections to words, heads, biases and norms. A user's own module says nothing of its layers
    (no axis has a name): there it is every kernel.
    """
    axis = {"linear": -2, "conv1d": -2, "fused_conv1d": -3}.get(leaf.kind, 0)
    return axis if leaf.repeated or not any(leaf.axes) else 0


def matches(patterns: Iterable[str], name: str) -> bool:
    """Tell whether any of the regular expressions is found in `name`."""
    return any(re.search(pattern, name) for pattern in patterns)


def held(variables: Mapping[str, Any], cast: Callable[[Any], Any]) -> Any:
    """Return what a model holds of a module's variables: the parameters, cast, and statistics as they are."""
    params = cast(variables["params"])
    return {"params": params, STATISTICS: variables[STATISTICS]} if STATISTICS in variables else params


def shapes_by_rows(traced: dict[str, Any], rows: list[Row], *, scan_layers: bool, name: str) -> dict[str, Any]:
    """Return the shapes of a model by path, from those that its scanned twin was `traced` with.

    Raises `CheckpointError` where the rows of the model `name` are not those of its parameters.
    """
    scanned = leaves(rows, scan_layers=True)
    strangers = sorted(traced.keys() ^ scanned.keys())
    if strangers:
        raise CheckpointError(f"{name} has parameters without rows or the reverse: {listed(strangers)}.")
    if scan_layers:
        return traced
    shapes = {}
    for path, leaf in scanned.items():
        shape = traced[path].shape[1:] if leaf.stacked else traced[path].shape
        shapes.update({row.path: jax.ShapeDtypeStruct(shape, traced[path].dtype) for row in leaf.rows})
    return shapes
