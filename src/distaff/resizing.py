"""Another size of the vocabulary, for tokens that were added after training, and rows that only fill it up."""

import copy
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distaff.core.errors import UsageError
from distaff.core.mesh import RULES
from distaff.core.tree import Tree, flatten, unflatten
from distaff.loading import random_params
from distaff.weights import Leaf

# Field of a config in memory, never of a file: rows of the tables where they are more than the vocabulary's entries.
PADDED = "_padded_vocab_size"


def vocab_rows(config: Any) -> int:
    """Return how many rows the tables of the vocabulary have."""
    return getattr(config, PADDED, None) or config.vocab_size


def padded_for(config: Any, mesh: Mesh | None) -> Any:
    """Return the config, or a copy that pads its vocabulary, so that it divides over the axis `tensor` of `mesh`."""
    parts = 1 if mesh is None else mesh.shape[RULES["vocab"]]
    if parts == 1 or getattr(config, "vocab_size", None) is None or vocab_rows(config) % parts == 0:
        return config
    config = copy.deepcopy(config)
    setattr(config, PADDED, -(-vocab_rows(config) // parts) * parts)
    return config


def without_padding(config: Any, flat: dict[str, np.ndarray], table: Mapping[str, Leaf]) -> tuple[Any, dict]:
    """Return a copy of the config and the parameters by path as a file has them: the vocabulary's entries alone."""
    config, flat = copy.deepcopy(config), dict(flat)
    if hasattr(config, PADDED):
        delattr(config, PADDED)
        for path, leaf in table.items():
            if "vocab" in leaf.axes:
                entries = (slice(config.vocab_size if axis == "vocab" else None) for axis in leaf.axes)
                flat[path] = flat[path][tuple(entries)]
    return config, flat


def resize_token_embeddings(
    self: Any, new_size: int, params: Tree | None = None, *, pad_to_multiple_of: int | None = None, seed: int = 0
) -> Tree:
    """Give the vocabulary of a text model `new_size` entries, and return the parameters for it.

    Everything with a vocabulary axis is resized: word embeddings, and projections to the vocabulary and their biases;
    a tied head follows its embeddings. Entries that both sizes have are kept, new ones are random, a
    function of `seed`. `model.config` is replaced by a copy that says the size, and a model that holds parameters
    holds the new ones.

    With `pad_to_multiple_of` the arrays get rows beyond `new_size` up to a multiple of it, which accelerators and
    meshes like. Nobody else sees them: they have no logit in any answer, `config.vocab_size` is `new_size`, and
    `save_pretrained` writes the entries alone. (In Transformers they are entries like any other.)

    Raises `UsageError` for a model without a vocabulary, and for a size or a multiple below 1.
    """
    table = {path: leaf for path, leaf in self._table.items() if "vocab" in leaf.axes}
    if not table:
        raise UsageError(f"{type(self).__name__} has no vocabulary to resize: use a text model.")
    if new_size < 1:
        raise UsageError(f"A vocabulary of {new_size} entries cannot be: pass len(tokenizer).")
    if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
        raise UsageError(f"pad_to_multiple_of is {pad_to_multiple_of}: it must be at least 1.")
    flat = flatten(self.params if params is None else params)
    config, flat = without_padding(self.config, flat, table)
    config.vocab_size = int(new_size)
    if pad_to_multiple_of is not None and new_size % pad_to_multiple_of:
        setattr(config, PADDED, -(-config.vocab_size // pad_to_multiple_of) * pad_to_multiple_of)
    config = padded_for(config, self.mesh)
    resized = type(self)(
        config,
        self.module.clone(config=config),
        input_shape=self.input_shape,
        seed=self.seed,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        mesh=self.mesh,
        _do_init=False,
    )
    shapes = flatten(resized.params_shape_tree)
    made = _random_entries(config, table, shapes, seed)
    for path, leaf in table.items():
        kept, values = np.asarray(flat[path]), np.zeros(shapes[path].shape, flat[path].dtype)
        values[tuple(map(slice, made[path].shape))] = made[path]
        both = tuple(slice(min(sizes)) for sizes in zip(kept.shape, made[path].shape, strict=True))
        values[both] = kept[both]
        flat[path] = jax.device_put(values, self._sharding(leaf, values.shape))
    params = unflatten(flat)
    if self._params is not None:
        resized.params = params
    resized.loading_report = self.loading_report
    vars(self).update(vars(resized))
    return params


def _random_entries(config: Any, table: Mapping[str, Leaf], shapes: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """Return random arrays of the leaves of `table`, without padding: they are the same with it."""
    entries = {}
    for path, leaf in table.items():
        whole = shapes[path]
        sizes = [config.vocab_size if axis == "vocab" else size for axis, size in zip(leaf.axes, whole.shape)]
        entries[path] = jax.ShapeDtypeStruct(sizes, whole.dtype)
    return random_params(table, entries, seed=seed, initializer_range=getattr(config, "initializer_range", 0.02))
