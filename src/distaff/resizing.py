"""Another size of the vocabulary, for tokens that were added after training."""

import copy
from typing import Any

import jax
import numpy as np

from distaff.core.errors import UsageError
from distaff.core.tree import Tree, flatten, unflatten
from distaff.loading import random_params


def resize_token_embeddings(self: Any, new_size: int, params: Tree | None = None, *, seed: int = 0) -> Tree:
    """Give the vocabulary of a text model `new_size` entries, and return the parameters for it.

    Everything with a vocabulary axis is resized: word embeddings, and projections to the vocabulary and their biases;
    a tied head follows its embeddings. Entries that both sizes have are kept, new ones are random, a
    function of `seed`. `model.config` is replaced by a copy that says the size, and a model that holds parameters
    holds the new ones.

    Raises `UsageError` for a model without a vocabulary and for a size below 1.
    """
    table = {path: leaf for path, leaf in self._table.items() if "vocab" in leaf.axes}
    if not table:
        raise UsageError(f"{type(self).__name__} has no vocabulary to resize: use a text model.")
    if new_size < 1:
        raise UsageError(f"A vocabulary of {new_size} entries cannot be: pass len(tokenizer).")
    flat = flatten(self.params if params is None else params)
    config = copy.deepcopy(self.config)
    config.vocab_size = int(new_size)
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
    deviation = getattr(config, "initializer_range", 0.02)
    made = random_params(table, shapes, seed=seed, initializer_range=deviation)
    for path, leaf in table.items():
        kept, values = np.asarray(flat[path]), np.array(made[path], flat[path].dtype)
        both = tuple(slice(min(sizes)) for sizes in zip(kept.shape, values.shape, strict=True))
        values[both] = kept[both]
        flat[path] = jax.device_put(values, self._sharding(leaf, values.shape))
    params = unflatten(flat)
    if self._params is not None:
        resized.params = params
    resized.loading_report = self.loading_report
    vars(self).update(vars(resized))
    return params
