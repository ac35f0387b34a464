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
    # The key first: XLA on CPU then lays out one operand less, here and in the backward pass.
    scores = jnp.einsum("bkhd,bqhd->bhqk", key, query * scale)  # [batch, heads, queries, keys]
    scores = scores.astype(jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    weights = dropout(jax.nn.softmax(scores, axis=-1).astype(value.dtype))
    context = jnp.einsum("bhqk,bkhd->bhqd", weights, value)
    return context.swapaxes(1, 2), weights
