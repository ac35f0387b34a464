"""The two kinds of models as two pure functions: what stands before the first new token, and one token more."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.nn.cache import Cache

Params = Any
# The structure of an empty cache, and shape and dtype of its arrays: hashable, so that a program can be made for it.
Blank = tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]


class Memory(NamedTuple):
    """What the model remembers of each row.

    cache: keys and values, with slots for all tokens to come. mask: which slots may be attended `[rows, slots]`; of
    encoder-decoders, which tokens of the source `[rows, source]`. lengths: real tokens of the prompt `[rows]`.
    """

    cache: Cache
    mask: jax.Array
    lengths: jax.Array

    def repeated(self, count: int) -> "Memory":
        """Return `count` copies of each row, one after the other."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0) if leaf.ndim else leaf, self)

    def chosen(self, parents: jax.Array) -> "Memory":
        """Return rows that continue those of `parents` `[rows]`, each a copy of the same prompt."""
        # All but the keys and values of generated tokens is equal within a prompt's copies.
        layers = tuple(
            layer._replace(own=jax.tree.map(lambda leaf: jnp.take(leaf, parents, axis=0), layer.own))
            for layer in self.cache.layers
        )
        return self._replace(cache=self.cache.replace(layers=layers))  # type: ignore[attr-defined]


class Inputs(NamedTuple):
    """ids and mask of the prompts, or of the sources `[batch, length]`; start: decoders' prompts `[batch, length]`.

    Arrays of numpy on the host, of jax on devices.
    """

    ids: Any
    mask: Any
    start: Any = None


def blank_of(make_cache: Any) -> Blank:
    """Return the shapes of the cache that `make_cache()` makes, which is only traced."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(make_cache))
    return structure, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)


def empty(blank: Blank) -> Cache:
    """Return the cache without tokens."""
    structure, leaves = blank
    return jax.tree.unflatten(structure, [jnp.zeros(shape, dtype) for shape, dtype in leaves])


@dataclass(frozen=True)
class CausalDecoder:
    """A decoder that continues its prompt, which is padded on the left."""

    module: nn.Module

    def begin(self, params: Params, inputs: Inputs, blank: Blank) -> tuple[jax.Array, Memory]:
        """Return the scores after the prompts `[batch, vocab]`, and the memory of them."""
        cache, mask = empty(blank), inputs.mask.astype(bool)
        free = jnp.ones((mask.shape[0], cache.slots - mask.shape[1]), bool)
        everywhere = jnp.concatenate([mask, free], axis=1)
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        memory = Memory(cache, everywhere, mask.sum(axis=1))
        return self._call(params, inputs.ids, positions, memory)

    def proceed(self, params: Params, tokens: jax.Array, step: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Return the scores after `tokens` `[rows]`, the new ones number `step`, counted from 0."""
        return self._call(params, tokens[:, None], (memory.lengths + step)[:, None], memory)

    def _call(self, params, ids, positions, memory):
        outputs: Any = self.module.apply(
            {"params": params}, ids, memory.mask, positions, memory.cache, lazy_logits=True
        )
        # Of a prompt, the head sees the last position alone.
        scores = outputs.logits.at(slice(-1, None)).logits()[:, 0]
        return scores.astype(jnp.float32), memory._replace(cache=outputs.past_key_values)


@dataclass(frozen=True)
class EncoderDecoder:
    """An encoder that reads the source once, and a decoder that starts from a token or more."""

    module: nn.Module

    def begin(self, params: Params, inputs: Inputs, blank: Blank) -> tuple[jax.Array, Memory]:
        """Return the scores after the decoder's prompts `[batch, vocab]`, and the memory of source and prompts."""
        assert inputs.start is not None
        encoded: Any = self.module.apply({"params": params}, inputs.ids, inputs.mask, method="encode")
        lengths = jnp.full(inputs.ids.shape[:1], inputs.start.shape[1], jnp.int32)
        memory = Memory(empty(blank), inputs.mask, lengths)
        return self._call(params, inputs.start, encoded.last_hidden_state, memory)

    def proceed(self, params: Params, tokens: jax.Array, step: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Return the scores after `tokens` `[rows]`, the new ones number `step`, counted from 0."""
        return self._call(params, tokens[:, None], None, memory)

    def _call(self, params, ids, states, memory):
        outputs: Any = self.module.apply(
            {"params": params},
            ids,
            states,
            memory.mask,
            past_key_values=memory.cache,
            lazy_logits=True,
            method="decode",
        )
        scores = outputs.logits.at(slice(-1, None)).logits()[:, 0]
        return scores.astype(jnp.float32), memory._replace(cache=outputs.past_key_values)


Decoder = CausalDecoder | EncoderDecoder
