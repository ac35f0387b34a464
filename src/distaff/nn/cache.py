"""The functional key/value cache of decoders: plain pytrees that go into a call and come back changed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


class KeyValue(NamedTuple):
    """Projected keys and values, each `[batch, heads, slots, head_dim]`."""

    key: jax.Array
    value: jax.Array

    def write(self, new: "KeyValue", start: jax.Array) -> "KeyValue":
        """Return these slots with `new` `[batch, heads, length, head_dim]` written from slot `start` on."""
        place = (0, 0, start, 0)
        return KeyValue(
            lax.dynamic_update_slice(self.key, new.key.astype(self.key.dtype), place),
            lax.dynamic_update_slice(self.value, new.value.astype(self.value.dtype), place),
        )


class LayerCache(NamedTuple):
    """What one decoder layer keeps: its own keys and values, and those of the encoder's states where it has them."""

    own: KeyValue
    source: KeyValue | None = None


@struct.dataclass
class Cache:
    """One `LayerCache` a layer, and in how many slots of it tokens were written (int32 scalar)."""

    layers: tuple[LayerCache, ...]
    filled: jax.Array

    @property
    def slots(self) -> int:
        """How many tokens fit."""
        return self.layers[0].own.key.shape[2]


def empty_cache(*, num_layers: int, batch: int, slots: int, num_heads: int, head_dim: int, dtype: Any) -> Cache:
    """Return a cache without tokens."""
    shape = (batch, num_heads, slots, head_dim)
    # An array each: one that is used twice cannot be donated.
    layers = tuple(LayerCache(KeyValue(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))) for _ in range(num_layers))
    return Cache(layers, jnp.zeros((), jnp.int32))


def advance(cache: Cache | None, layers: tuple[LayerCache, ...] | None, count: int) -> Cache | None:
    """Return the cache after `count` more tokens, whose keys and values are in `layers`; None where there is none."""
    return None if cache is None or layers is None else Cache(layers, cache.filled + count)
