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
    scale: float,
    dropout: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return `([batch, queries, heads, head_dim], weights [batch, heads, queries, keys])`.

    `query` is `[batch, queries, heads, head_dim]`, `key` and `value` `[batch, keys, heads, head_dim]`, `bias`
    broadcasts to the scores. The softmax is float32; `dropout` acts on the weights that are returned.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * scale, key)  # [batch, heads, queries, keys]
    scores = scores.astype(jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    weights = dropout(jax.nn.softmax(scores, axis=-1).astype(value.dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value), weights
