"""Boolean masks, and the one place that turns them into a bias on attention scores."""

from typing import overload

import jax
import jax.numpy as jnp
from jax import lax

from distaff.nn.cache import Cache


def padding_mask(attention_mask: jax.Array) -> jax.Array:
    """Return booleans `[batch, 1, 1 or queries, keys]` from a mask that is non-zero where attended.

    `attention_mask` is `[batch, keys]`, or `[batch, queries, keys]` where queries differ, as in packed rows.
    """
    mask = attention_mask.astype(bool)
    return mask[:, None] if mask.ndim == 3 else mask[:, None, None]


def causal_mask(hidden: jax.Array, cache: Cache | None = None, *, window: int | None = None) -> jax.Array:
    """Return `[1, 1, length, keys]` booleans for `hidden` `[batch, length, ...]`: keys up to the query.

    The keys are those of `hidden`, or the slots of `cache`, behind whose filled ones `hidden` stands. With `window`,
    the last so many of them, the query's own among them.
    """
    length = hidden.shape[1]
    shape = (1, 1, length, length if cache is None else cache.slots)
    # Comparison of iotas, not a slice of a big mask: it exports with a free length.
    queries, keys = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (2, 3))
    queries = queries if cache is None else queries + cache.filled
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def combine(*masks: jax.Array | None) -> jax.Array | None:
    """Return the conjunction of those masks that are given, or None."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    total = given[0]
    for mask in given[1:]:
        total = total & mask
    return total


@overload
def bias_of(mask: jax.Array, dtype) -> jax.Array: ...
@overload
def bias_of(mask: jax.Array | None, dtype) -> jax.Array | None: ...
def bias_of(mask: jax.Array | None, dtype) -> jax.Array | None:
    """Return 0 where `mask` holds and the lowest finite number elsewhere.

    Finite, so that a row in which nothing may be attended becomes uniform instead of NaN, in every dtype.
    """
    return None if mask is None else jnp.where(mask, 0.0, jnp.finfo(dtype).min).astype(dtype)
