"""Scaled dot-product attention on projected heads (Vaswani et al. 2017, section 3.2.1), by the way that is chosen."""

from collections.abc import Callable
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from distaff.core.errors import UsageError
from distaff.nn.mask import Sight

IMPLEMENTATIONS = ("auto", "eager", "blocks", "xla", "cudnn")
# "auto" writes so many scores of a head out. On CPU, forwards and backwards, blocks are as fast at 384 by 384, 1.3
# times faster at 512 and 1.6 times at 1024 (2.8 where causal), with 1/4, 1/7 and 1/20 of the memory. Accelerators were
# not measured; they like one large product better than many small ones.
MOST_SCORES = 512**2
_FUSED_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def check_implementation(name: str) -> None:
    """Raise `UsageError` for a way to attend that is not known, or not to be had here."""
    if name not in IMPLEMENTATIONS:
        raise UsageError(f"attn_implementation is '{name}': choose one of {', '.join(IMPLEMENTATIONS)}.")
    if name == "cudnn" and jax.default_backend() != "gpu":
        raise UsageError(
            f"attn_implementation is 'cudnn', and the devices are of the kind '{jax.default_backend()}': take 'blocks' "
            "or 'auto', which uses cuDNN where it is."
        )


def chosen(name: str, query: jax.Array, key: jax.Array, sight: Sight, *, dropout_rate: float) -> str:
    """Return "eager", "blocks", "xla" or "cudnn" for heads `[batch, heads, length, head_dim]`."""
    check_implementation(name)
    if name != "auto":
        return name
    plain = not dropout_rate and query.dtype in _FUSED_DTYPES and query.shape[-1] in range(8, 129, 8)
    unmasked = not jax.tree.leaves(sight) and (not sight.causal or query.shape[2] == key.shape[2])
    if plain and unmasked and jax.default_backend() == "gpu" and _has_cudnn():
        return "cudnn"
    return "eager" if query.shape[2] * key.shape[2] <= MOST_SCORES else "blocks"


@cache
def _has_cudnn() -> bool:
    """Tell whether JAX takes cuDNN for a small case: it looks at the library's version and the kind of the GPU."""
    shape = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(lambda one: jax.nn.dot_product_attention(one, one, one, implementation="cudnn"), shape)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


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


def attend_by_library(
    query: jax.Array, key: jax.Array, value: jax.Array, sight: Sight, *, implementation: str, dropout_rate: float
) -> jax.Array:
    """Return `[batch, heads, queries, head_dim]` for scaled queries, by `jax.nn.dot_product_attention`.

    What it knows no argument for is written out as a bias. Raises `UsageError` for dropout, and for dtypes that it does
    not have here.
    """
    if dropout_rate:
        raise UsageError(
            f"attn_implementation is '{implementation}', which drops no attention weights out, and the config says "
            f"{dropout_rate}: set that to 0, or take 'blocks'."
        )
    if implementation == "cudnn" and query.dtype not in _FUSED_DTYPES:
        raise UsageError(f"cuDNN attends in bfloat16 or float16, not in {query.dtype}: set dtype, or take 'blocks'.")
    if implementation == "xla" and query.dtype == jnp.float16 and jax.default_backend() == "cpu":
        raise UsageError("attn_implementation is 'xla', which has no float16 on CPU: take 'blocks', or bfloat16.")
    square = query.shape[2] == key.shape[2]
    causal = sight.causal and square and not jax.tree.leaves(sight)
    bias = None if causal else sight.bias(query.shape[2], key.shape[2])
    if bias is not None:
        bias = jnp.maximum(bias, np.float32(jnp.finfo(query.dtype).min)).astype(query.dtype)
    query, key, value = (each.swapaxes(1, 2) for each in (query, key, value))  # [batch, length, heads, head_dim]
    library: Literal["xla", "cudnn"] = "cudnn" if implementation == "cudnn" else "xla"
    context = jax.nn.dot_product_attention(
        query, key, value, bias=bias, scale=1.0, is_causal=causal, implementation=library
    )
    return context.swapaxes(1, 2)
