"""Attention by blocks of keys, whose memory grows with the length of rows and not with its square.

The softmax runs along with the blocks (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867), and the
backward pass computes the scores of a block again (Dao et al. 2022, https://arxiv.org/abs/2205.14135).
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from distaff.nn.dropout import KEPT
from distaff.nn.mask import Sight

# Queries and keys of a block. On CPU 256 are as fast and 512 slower, and memory grows with the square.
BLOCK = 128
_LOWEST = float(jnp.finfo(jnp.float32).min)
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend_in_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sight: Sight,
    *,
    rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    block: int | None = None,
) -> jax.Array:
    """Return `[batch, heads, queries, head_dim]` for scaled queries of that shape.

    `key` and `value` are `[batch, heads, keys, head_dim]`. Scores and the softmax are float32. With `rng`, weights are
    dropped out, drawn anew for each block. A query that sees nothing gets the mean of some values instead of all.
    """
    plan = _Plan.of(query.shape[2], key.shape[2], block or BLOCK, dropout_rate if rng is not None else 0.0)
    more_queries, more_keys = plan.rows * plan.height - plan.queries, plan.columns * plan.width - plan.keys
    padding, relative = sight.padding, sight.relative
    if padding is not None:
        ends = (0, 0), (0, 0), (0, more_queries if padding.shape[2] != 1 else 0), (0, more_keys)
        padding = jnp.pad(padding, ends)
    if relative is not None:
        relative = jnp.pad(relative, ((0, 0), (more_queries, more_keys)))
    rest = replace(sight, padding=padding, relative=None, origin=sight.origin + more_queries)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, more_queries), (0, 0)))
    key, value = (jnp.pad(each, ((0, 0), (0, 0), (0, more_keys), (0, 0))) for each in (key, value))
    return _attended(plan, query, key, value, relative, rest, rng)[:, :, : plan.queries]


class _Plan(NamedTuple):
    """`rows` times `columns` blocks of `height` queries and `width` keys, which cover `queries` and `keys`."""

    queries: int
    keys: int
    rows: int
    columns: int
    height: int
    width: int
    dropout_rate: float

    @classmethod
    def of(cls, queries: int, keys: int, block: int, dropout_rate: float) -> "_Plan":
        """Return as few blocks of at most `block` as there can be, of nearly equal sizes."""
        rows, columns = -(-queries // block), -(-keys // block)
        return cls(queries, keys, rows, columns, -(-queries // rows), -(-keys // columns), dropout_rate)

    def columns_of(self, sight: Sight, row: jax.Array) -> tuple[Any, Any]:
        """Return the first block of keys that queries of block `row` see, and the one behind the last."""
        if not sight.causal:
            return 0, self.columns
        place = row * self.height + (0 if sight.start is None else sight.start)  # that of the block's first query
        first = 0 if sight.window is None else jnp.maximum(place - sight.window + 1, 0) // self.width
        return first, jnp.minimum((place + self.height - 1) // self.width + 1, self.columns)

    def rows_of(self, sight: Sight, column: jax.Array) -> tuple[Any, Any]:
        """Return the first block of queries that see keys of block `column`, and the one behind the last."""
        if not sight.causal:
            return 0, self.rows
        place = column * self.width - (0 if sight.start is None else sight.start)  # that of its first key's own query
        last: Any = self.rows
        if sight.window is not None:
            # The last query whose window holds the last key; none where all are earlier than the cache's.
            farthest = place + self.width - 1 + sight.window - 1
            last = jnp.minimum(farthest // self.height + 1, self.rows)
        return jnp.maximum(place, 0) // self.height, last

    def scores(self, query: jax.Array, key: jax.Array, sight: Sight, row: Any, column: Any) -> jax.Array:
        """Return `[batch, heads, height, width]` of two blocks; -inf for keys that only fill the last block."""
        scores = _product("bhqd,bhkd->bhqk", query, key)
        places = {"first_query": row * self.height, "first_key": column * self.width}
        bias = sight.bias(self.height, self.width, **places)
        scores = scores if bias is None else scores + bias
        if self.keys % self.width:
            real = lax.broadcasted_iota(jnp.int32, (1, 1, 1, self.width), 3) + column * self.width < self.keys
            scores = jnp.where(real, scores, -jnp.inf)
        return scores

    def kept(self, rng: jax.Array | None, shape: tuple[int, ...], row: Any, column: Any) -> jax.Array | float:
        """Return the factors of dropout on the weights of a block, the same whenever they are asked for."""
        if rng is None:
            return 1.0
        keep = 1.0 - self.dropout_rate
        drawn = jax.random.bernoulli(jax.random.fold_in(rng, row * self.columns + column), keep, shape)
        return jnp.where(drawn, 1.0 / keep if keep else 0.0, 0.0)


def _block(values: jax.Array, index: Any, size: int) -> jax.Array:
    """Return block `index` of `size` along the length of `[batch, heads, length, ...]`."""
    return lax.dynamic_slice_in_dim(values, index * size, size, axis=2)


def _joined(blocks: jax.Array) -> jax.Array:
    """Return `[batch, heads, blocks * size, ...]` for `[blocks, batch, heads, size, ...]`."""
    moved = jnp.moveaxis(blocks, 0, 2)
    return moved.reshape(*moved.shape[:2], -1, moved.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(plan: _Plan, query, key, value, relative, sight: Sight, rng) -> jax.Array:
    return _forward(plan, query, key, value, relative, sight, rng)[0]


def _forward(plan: _Plan, query, key, value, relative, sight: Sight, rng):
    full = replace(sight, relative=relative)
    batch, heads, _, head_dim = value.shape

    def attend_row(row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        queries = _block(query, row, plan.height)

        def add(column, before):
            highest, total, out = before
            scores = plan.scores(queries, _block(key, column, plan.width), full, row, column)
            higher = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(highest - higher)
            total = total * shrink + weights.sum(axis=-1, keepdims=True)
            weights = (weights * plan.kept(rng, weights.shape, row, column)).astype(value.dtype)
            return (
                higher,
                total,
                out * shrink + _product("bhqk,bhkd->bhqd", weights, _block(value, column, plan.width)),
            )

        # Finite at the start: -inf minus -inf, of keys that nobody sees, would be NaN.
        one = (batch, heads, plan.height, 1)
        start = jnp.full(one, _LOWEST), jnp.zeros(one), jnp.zeros((batch, heads, plan.height, head_dim))
        highest, total, out = lax.fori_loop(*plan.columns_of(sight, row), add, start)
        # Zero where a row only fills the last block.
        total = jnp.maximum(total, _SMALLEST)
        return (out / total).astype(value.dtype), highest, total

    rows = lax.map(attend_row, jnp.arange(plan.rows))
    out, highest, total = (checkpoint_name(_joined(each), KEPT) for each in rows)
    return out, (query, key, value, relative, sight, rng, out, highest, total)


def _backward(plan: _Plan, saved, grad: jax.Array):
    query, key, value, relative, sight, rng, out, highest, total = saved
    full = replace(sight, relative=relative)
    # What all keys of a query have in common in the gradient of the softmax: the mean of the weights' own.
    mean = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)

    def add_column(before, column: jax.Array):
        keys, values = _block(key, column, plan.width), _block(value, column, plan.width)

        def add(row, before):
            grad_query, grad_relative, grad_keys, grad_values = before
            queries, grads, highests, totals, means = (
                _block(each, row, plan.height) for each in (query, grad, highest, total, mean)
            )
            weights = jnp.exp(plan.scores(queries, keys, full, row, column) - highests) / totals
            kept = plan.kept(rng, weights.shape, row, column)
            grad_values += _product("bhqk,bhqd->bhkd", (weights * kept).astype(grad.dtype), grads)
            grad_scores = weights * (_product("bhqd,bhkd->bhqk", grads, values) * kept - means)
            if relative is not None:
                grad_relative += _grad_relative(plan, relative, sight, grad_scores, row, column)
            grad_scores = grad_scores.astype(key.dtype)
            grad_keys += _product("bhqk,bhqd->bhkd", grad_scores, queries)
            part = _block(grad_query, row, plan.height) + _product("bhqk,bhkd->bhqd", grad_scores, keys)
            grad_query = lax.dynamic_update_slice_in_dim(grad_query, part, row * plan.height, axis=2)
            return grad_query, grad_relative, grad_keys, grad_values

        zeros = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
        *before, grad_keys, grad_values = lax.fori_loop(*plan.rows_of(sight, column), add, (*before, *zeros))
        return tuple(before), (grad_keys, grad_values)

    start = jnp.zeros(query.shape, jnp.float32), None if relative is None else jnp.zeros_like(relative)
    (grad_query, grad_relative), columns = lax.scan(add_column, start, jnp.arange(plan.columns))
    grad_key, grad_value = map(_joined, columns)
    grads = grad_query.astype(query.dtype), grad_key.astype(key.dtype), grad_value.astype(value.dtype)
    return *grads, grad_relative, None, None


def _grad_relative(plan: _Plan, relative: jax.Array, sight: Sight, grad: jax.Array, row: Any, column: Any) -> jax.Array:
    """Return the gradient of `relative` `[heads, offsets]` for that of a block's scores."""

    def bias(relative: jax.Array) -> jax.Array:
        places = {"first_query": row * plan.height, "first_key": column * plan.width}
        bias = replace(sight, relative=relative).bias(plan.height, plan.width, **places)
        assert bias is not None
        return jnp.broadcast_to(bias, grad.shape)

    return jax.vjp(bias, relative)[1](grad)[0]


_attended.defvjp(_forward, _backward)
