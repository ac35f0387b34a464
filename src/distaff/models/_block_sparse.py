"""Block-sparse attention of BigBird (Zaheer et al. 2020, https://arxiv.org/abs/2007.14062, section 2).

A row of tokens is cut into blocks. The first and the last block attend to everything and are attended to by everything;
each other block attends to them, to itself and its two neighbours, and to a few random blocks.

Letters of the einsums: b batch, h heads, n blocks, g the two global blocks, q queries and k keys of a block, l keys of
the row, c key blocks of one query block, d head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distaff.nn.cache import KeyValue

# Lengths for which the paper's code draws random blocks from the first 1,024 tokens.
_PAPER_LENGTHS, _PAPER_REACH = (1024, 3072, 4096), 1024
# Of the key blocks of a query block: first, left, itself, right, last. Random ones follow.
_FIXED = 5


class Blocks(NamedTuple):
    """What stands in the place of a bias: which tokens are real, `[batch, blocks, block size]` booleans."""

    real: jax.Array


class BlockWeights(NamedTuple):
    """Attention weights without the zeros between them.

    ends: of the first and last block, `[batch, heads, 2, queries, length]`. inner: of the others,
    `[batch, heads, blocks - 2, queries, key blocks, keys]`. places: which blocks those are, `[heads, blocks - 2, key
    blocks]`.
    """

    ends: jax.Array
    inner: jax.Array
    places: jax.Array

    def dense(self) -> jax.Array:
        """Return `[batch, heads, length, length]`."""
        batch, heads, inner_blocks, size, _, _ = self.inner.shape
        blocks = inner_blocks + 2
        where = jax.nn.one_hot(self.places, blocks, dtype=self.inner.dtype)  # [heads, blocks - 2, key blocks, blocks]
        inner = jnp.einsum("bhnqck,hncm->bhnqmk", self.inner, where)
        inner = inner.reshape(batch, heads, inner_blocks, size, blocks * size)
        whole = jnp.concatenate([self.ends[:, :, :1], inner, self.ends[:, :, 1:]], axis=2)
        return whole.reshape(batch, heads, blocks * size, blocks * size)


def least_sparse(block_size: int, num_random: int) -> int:
    """Return the length up to which attention is full: two global, three sliding and twice the random blocks."""
    return (5 + 2 * num_random) * block_size


def legal_blocks(blocks: int, block_size: int, num_random: int) -> np.ndarray:
    """Return `[blocks - 2, reach]` booleans: which of the first blocks each inner block may draw.

    None that it attends to anyway, and only from the beginning of the row, as in the paper's code and PyTorch.
    """
    rows = np.arange(1, blocks - 1)[:, None]
    if blocks * block_size in _PAPER_LENGTHS:
        keys = np.arange(min(_PAPER_REACH // block_size, blocks - 1))[None]
        return (keys > 0) & (abs(keys - rows) > 1)
    reach = _FIXED + 2 * num_random
    keys = np.arange(reach)[None]
    crossed = ((rows == 1) & (keys == reach - 2)) | ((rows == reach - 2) & (keys == 1))
    return (keys > 0) & (keys < reach - 1) & (abs(keys - rows) > 1) & ~crossed


def draw_blocks(key: jax.Array, blocks: int, block_size: int, *, num_random: int, num_heads: int) -> jax.Array:
    """Return `[heads, blocks - 2, random]`: different legal blocks for each head and inner block."""
    legal = legal_blocks(blocks, block_size, num_random)
    draws = jax.random.uniform(key, (num_heads, *legal.shape))
    return jax.lax.top_k(jnp.where(legal[None], draws, -1.0), num_random)[1]


def attend_blocks(
    query: jax.Array,
    used: KeyValue,
    real: jax.Array,
    *,
    scale: jax.Array | float,
    drawn: jax.Array | None,
    repeats: int,
) -> tuple[jax.Array, BlockWeights]:
    """Return `[batch, heads, length, head_dim]` and the weights.

    `query` is `[batch, heads, length, head_dim]`, `real` `[batch, blocks, block size]`, `drawn` the random blocks
    `[heads, blocks - 2, random]`. Without them the first block counts `repeats` times more: in evaluation PyTorch
    takes it for every random block.
    """
    batch, heads, length, depth = query.shape
    blocks, size = real.shape[1:]

    def cut(values: jax.Array) -> jax.Array:
        return values.reshape(batch, heads, blocks, size, depth)

    query = cut(query * scale)
    ends, end_weights = _attend_ends(query, used, real)
    inner, inner_weights = _attend_inner(query[:, :, 1:-1], KeyValue(*map(cut, used)), real, drawn, repeats)
    context = jnp.concatenate([ends[:, :, :1], inner, ends[:, :, 1:]], axis=2)  # [batch, heads, blocks, size, head_dim]
    context = jnp.where(real[:, None, :, :, None], context, 0)  # as in PyTorch, padding attends to nothing
    fixed = np.arange(blocks - 2)[:, None] + np.arange(_FIXED - 2)[None]
    fixed = np.concatenate([np.zeros((blocks - 2, 1), int), fixed, np.full((blocks - 2, 1), blocks - 1)], axis=1)
    places = jnp.broadcast_to(fixed[None], (heads, *fixed.shape))
    if drawn is not None:
        places = jnp.concatenate([places, drawn], axis=2)
    return context.reshape(batch, heads, length, depth), BlockWeights(end_weights, inner_weights, places)


def _softmax(scores: jax.Array, mask: jax.Array, dtype) -> jax.Array:
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(dtype)


def _attend_ends(query: jax.Array, used: KeyValue, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the context of the first and last block, which attend to everything, and their weights."""
    ends = jnp.stack([query[:, :, 0], query[:, :, -1]], axis=2)
    scores = jnp.einsum("bhgqd,bhld->bhgql", ends, used.key).astype(jnp.float32)
    weights = _softmax(scores, real.reshape(real.shape[0], 1, 1, 1, -1), used.value.dtype)
    return jnp.einsum("bhgql,bhld->bhgqd", weights, used.value), weights


def _attend_inner(query, used: KeyValue, real, drawn, repeats: int) -> tuple[jax.Array, jax.Array]:
    """Return the context of the other blocks `[batch, heads, blocks - 2, size, head_dim]`, and their weights."""
    inner_blocks, size = query.shape[2:4]
    row = np.arange(inner_blocks)[None, :, None]
    # Neighbours are slices of the keys, not copies. The neighbour that is a global block is not attended to twice.
    masks = [
        real[:, :1],
        real[:, :-2] & (row > 0),
        real[:, 1:-1],
        real[:, 2:] & (row < inner_blocks - 1),
        real[:, -1:],
    ]  # each [batch, blocks - 2 or 1, size]

    def parts(values: jax.Array) -> list[jax.Array]:
        found = [values[:, :, :1], values[:, :, :-2], values[:, :, 1:-1], values[:, :, 2:], values[:, :, -1:]]
        # One block for all, [batch, heads, size, head_dim], or one for each query block.
        return [part[:, :, 0] if index in (0, _FIXED - 1) else part for index, part in enumerate(found)]

    def spec(part: jax.Array) -> str:
        return "bhnkd" if part.ndim == 5 else "bhkd"

    keys, values = parts(used.key), parts(used.value)
    shape = (*query.shape[:4], -1)
    masks = [jnp.broadcast_to(mask[:, None, :, None], (*query.shape[:4], size)) for mask in masks]
    if drawn is not None:
        keys, values = [*keys, _gathered(used.key, drawn)], [*values, _gathered(used.value, drawn)]
        found = jax.vmap(lambda blocks: real[:, blocks], out_axes=1)(drawn)  # [batch, heads, blocks - 2, random, size]
        found = found.reshape(*found.shape[:3], 1, -1)
        masks.append(jnp.broadcast_to(found, (*query.shape[:4], found.shape[-1])))
    scores = [jnp.einsum(f"bhnqd,{spec(key)}->bhnqk", query, key).astype(jnp.float32) for key in keys]
    if drawn is None:
        scores[0] = scores[0] + np.log1p(repeats)
    weights = _softmax(jnp.concatenate(scores, axis=-1), jnp.concatenate(masks, axis=-1), used.value.dtype)
    pieces = jnp.split(weights, [size * index for index in range(1, len(keys))], axis=-1)
    contexts = [
        jnp.einsum(f"bhnqk,{spec(value)}->bhnqd", piece, value) for piece, value in zip(pieces, values, strict=True)
    ]
    context = sum(contexts[1:], contexts[0])
    if drawn is None:
        # PyTorch reports one of those equal weights.
        weights = jnp.concatenate([pieces[0] / (1 + repeats), *pieces[1:]], axis=-1)
    return context, weights.reshape(*shape, size)


def _gathered(values: jax.Array, drawn: jax.Array) -> jax.Array:
    """Return the drawn blocks `[batch, heads, blocks - 2, random * size, head_dim]` of each head's `values`."""
    found = jax.vmap(lambda each, blocks: each[:, blocks], in_axes=(1, 0), out_axes=1)(values, drawn)
    return found.reshape(*found.shape[:3], -1, found.shape[-1])
