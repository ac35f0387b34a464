"""Scaled dot-product attention on projected heads (Vaswani et al. 2017, section 3.2.1)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None,
    scale: float | jax.Array,
    dropout: Callable[[jax.Array], jax.Array],
    float32_scores: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return `([batch, heads, queries, head_dim], weights [batch, heads, queries, keys])`.

    `query` is `[batch, heads, queries, head_dim]`, `key` and `value` `[batch, heads, keys, head_dim]`, `bias`
    broadcasts to the scores. The softmax is float32; `dropout` acts on the weights that are returned. With
    `float32_scores` the products of queries and keys are float32 too, which float16 does not hold where they are not
    scaled.
    """
    if float32_scores:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query * scale, key).astype(jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    weights = dropout(jax.nn.softmax(scores, axis=-1).astype(value.dtype))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value), weights
