"""Dtypes by name, and casting of parameters with a mask."""

import jax
import jax.numpy as jnp
import numpy as np

from distaff.core.errors import UsageError
from distaff.core.tree import Tree

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def dtype_of(name) -> np.dtype:
    """Return the floating dtype that `name` ("bfloat16", `jnp.bfloat16`, ...) stands for."""
    text = name if isinstance(name, str) else np.dtype(name).name
    if text not in DTYPES:
        raise UsageError(f"'{text}' is not a dtype that models use: choose one of {', '.join(DTYPES)}.")
    return np.dtype(DTYPES[text])


def is_floating(leaf) -> bool:
    """Tell whether `leaf` is an array (or the shape of one) of floating numbers, bfloat16 included."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def cast_floating(params: Tree, dtype, mask: Tree | None = None) -> Tree:
    """Cast the floating leaves of `params` to `dtype`; where `mask` (same structure, booleans) is False, leave them.

    Host arrays stay on the host, arrays on devices stay where they are.
    """
    dtype = dtype_of(dtype)

    def cast(leaf, chosen=True):
        return leaf.astype(dtype) if chosen and is_floating(leaf) else leaf

    return jax.tree.map(cast, params) if mask is None else jax.tree.map(cast, params, mask)


def cast_shapes(tree: Tree, dtype) -> Tree:
    """Return the shapes of `tree` with floating leaves of `dtype`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype if is_floating(leaf) else leaf.dtype), tree)
