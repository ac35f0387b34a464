"""What queries see, and the one place that turns it into a bias on attention scores."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from distaff.nn.cache import Cache

# A window that no row fills: all keys up to the query's own.
UNBOUNDED = 2**30


def padding_mask(attention_mask: jax.Array | None) -> jax.Array | None:
    """Return booleans `[batch, 1, 1 or queries, keys]` from a mask that is non-zero where attended.

    `attention_mask` is `[batch, keys]`, or `[batch, queries, keys]` where queries differ, as in packed rows.
    """
    if attention_mask is None:
        return None
    mask = attention_mask.astype(bool)
    return mask[:, None] if mask.ndim == 3 else mask[:, None, None]


def causal_mask(hidden: jax.Array, cache: Cache | None = None) -> jax.Array:
    """Return `[1, 1, length, keys]` booleans for `hidden` `[batch, length, ...]`: keys up to the query.

    The keys are those of `hidden`, or the slots of `cache`, behind whose filled ones `hidden` stands.
    """
    length = hidden.shape[1]
    queries, keys = _places(length, length if cache is None else cache.slots)
    return keys <= (queries if cache is None else queries + cache.filled)


@struct.dataclass
class Sight:
    """Which keys a query sees, and what is added to its scores, from which a bias is made: whole, or of a block.

    padding: booleans `[batch, 1, 1 or queries, keys]` that are False for what nobody sees. causal: a query sees the
    keys up to its own; start: the place of the first query among the keys, a scalar, by default 0. window: of those,
    the last so many, the query's own among them; a scalar. relative: float32 `[heads, offsets]`, added to the
    scores by the offset of a key from its query, both counted from 0; that of 0 stands at `origin`.
    """

    padding: jax.Array | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    start: jax.Array | None = None
    window: jax.Array | int | None = None
    relative: jax.Array | None = None
    origin: int = struct.field(pytree_node=False, default=0)

    def bias(
        self, queries: int, keys: int, *, first_query: jax.Array | int = 0, first_key: jax.Array | int = 0
    ) -> jax.Array | None:
        """Return float32 `[batch or 1, heads or 1, queries, keys]` for so many from the first ones on, None for zeros.

        With a window, two lowest numbers add up to -inf where a key is both out of the window and hidden otherwise: a
        query that sees padding alone attends to what is in its window, as in PyTorch, and its own key always is.
        """
        seen, near = self.padding, None
        if seen is not None:
            seen = _part(seen, 3, first_key, keys)
            seen = _part(seen, 2, first_query, queries) if seen.shape[2] != 1 else seen
        if self.causal:
            query, key = _places(queries, keys)
            offset = first_query - first_key + (0 if self.start is None else self.start)
            causal = key <= query + offset
            seen = causal if seen is None else seen & causal
            near = None if self.window is None else causal & (key > query + offset - self.window)
        if self.relative is None:
            bias = None if seen is None else bias_of(seen, jnp.float32)
        else:
            begin = first_key - first_query - (queries - 1) + self.origin
            relative = _skewed(_part(self.relative, 1, begin, queries + keys), queries, keys)[None]
            bias = relative if seen is None else jnp.where(seen, relative, jnp.finfo(jnp.float32).min)
        return bias if near is None or bias is None else bias + bias_of(near, jnp.float32)


def bias_of(mask: jax.Array, dtype) -> jax.Array:
    """Return 0 where `mask` holds and the lowest finite number elsewhere.

    Finite, so that a row in which nothing may be attended becomes uniform instead of NaN, in every dtype.
    """
    return jnp.where(mask, 0.0, jnp.finfo(dtype).min).astype(dtype)


def _places(queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of queries and of keys, `[1, 1, queries, keys]`."""
    # Comparison of iotas, not a slice of a big mask: it exports with a free length.
    shape = (1, 1, queries, keys)
    return lax.broadcasted_iota(jnp.int32, shape, 2), lax.broadcasted_iota(jnp.int32, shape, 3)


def _part(values: jax.Array, axis: int, first: jax.Array | int, size: int) -> jax.Array:
    return values if values.shape[axis] == size else lax.dynamic_slice_in_dim(values, first, size, axis)


def _skewed(values: jax.Array, queries: int, keys: int) -> jax.Array:
    """Return `[heads, queries, keys]` for `[heads, queries + keys]`, the first of which is of the lowest offset."""
    # Each row is the one above moved by one place: repeated rows of n + 1 numbers, cut into rows of n. Slices have
    # cheap gradients; those of a lookup for each pair would be scattered.
    heads, width = values.shape
    rows = jnp.broadcast_to(values[:, None], (heads, queries, width)).reshape(heads, queries * width)
    skewed = rows[:, : queries * (width - 1)].reshape(heads, queries, width - 1)
    return skewed[:, :, queries - 1 : queries - 1 + keys]
