"""Multi-head attention."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.mesh import constrain
from distaff.nn.attend import attend, attend_by_library, chosen
from distaff.nn.blocks import attend_in_blocks
from distaff.nn.cache import KeyValue
from distaff.nn.dense import FusedDense, dense
from distaff.nn.dropout import Dropout
from distaff.nn.mask import Sight


class Attended(NamedTuple):
    """`hidden` `[batch, queries, embed]`, `weights` `[batch, heads, queries, keys]`, and the keys and values used.

    Only the implementation "eager" has weights.
    """

    hidden: jax.Array
    weights: jax.Array | None
    used: KeyValue


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017) of `hidden` over itself, or over `source`.

    head_dim: width of a head, by default `embed / num_heads`. scale: factor on the scores, by default
    `head_dim ** -0.5`. use_bias: of the projections of queries, keys and values; out_bias: of that back to `embed`.
    fused: one projection "qkv", with an axis of three, instead of "query", "key" and "value". float32_scores: see
    `attend`; other implementations have float32 scores anyway. implementation: one of `IMPLEMENTATIONS`.
    """

    num_heads: int
    dropout_rate: float
    initializer_range: float
    head_dim: int | None = None
    scale: float | None = None
    use_bias: bool = True
    out_bias: bool = True
    fused: bool = False
    float32_scores: bool = False
    implementation: str = "auto"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def attend(
        self, query: jax.Array, used: KeyValue, sight: Any, *, scale: jax.Array | float, deterministic: bool
    ) -> tuple[jax.Array, Any]:
        """Return `[batch, heads, queries, head_dim]` and the weights if there are; a family may attend otherwise."""
        rate = 0.0 if deterministic else self.dropout_rate
        way = chosen(self.implementation, query, used.key, sight, dropout_rate=rate)
        if way == "eager":
            return attend(
                query,
                used.key,
                used.value,
                bias=sight.bias(query.shape[2], used.key.shape[2]),
                scale=scale,
                dropout=Dropout(self.dropout_rate, deterministic=deterministic),
                float32_scores=self.float32_scores,
            )
        key, value = (each.astype(query.dtype) for each in used)  # a cache may have another dtype
        query = (query * scale).astype(query.dtype)
        if way == "blocks":
            rng = self.make_rng("dropout") if rate else None
            return attend_in_blocks(query, key, value, sight, rng=rng, dropout_rate=rate), None
        return attend_by_library(query, key, value, sight, implementation=way, dropout_rate=rate), None

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,
        sight: Any = None,
        *,
        deterministic: bool,
        source: jax.Array | None = None,
        kept: KeyValue | None = None,
        start: jax.Array | None = None,
        scale: jax.Array | float | None = None,
    ) -> Attended:
        """Attend with `hidden` `[batch, queries, embed]`.

        `sight` is a `Sight`, by default one of all keys, or what a family's own `attend` takes.
        Keys and values come from `source` `[batch, keys, embed]`, by default from `hidden`. With `kept` and `start`
        they are first written into the cache's slots from `start` on, and all slots are attended to; with `kept`
        alone, those are the keys and values. `scale` of a call replaces that of the module.
        """
        embed = hidden.shape[-1]
        head_dim = self.head_dim or embed // self.num_heads

        def project(values: jax.Array, name: str, features: int, use_bias: bool) -> jax.Array:
            return dense(
                features,
                initializer_range=self.initializer_range,
                use_bias=use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
            )(values)

        def heads(values: jax.Array) -> jax.Array:
            apart = values.reshape(*values.shape[:-1], self.num_heads, head_dim).swapaxes(1, 2)
            return constrain(apart, "batch", "heads", None, None)

        width = self.num_heads * head_dim
        if self.fused:
            fields: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
            fused = FusedDense(3, width, self.initializer_range, self.use_bias, **fields, name="qkv")
            query, key, value = map(heads, fused(hidden))
            used = KeyValue(key, value)
        else:
            query = heads(project(hidden, "query", width, self.use_bias))
            if kept is not None and start is None:
                used = kept
            else:
                over = hidden if source is None else source
                used = KeyValue(*(heads(project(over, name, width, self.use_bias)) for name in ("key", "value")))
        if kept is not None and start is not None:
            used = kept.write(used, start)
        scale = scale if scale is not None else self.scale if self.scale is not None else head_dim**-0.5
        sight = Sight() if sight is None else sight
        context, weights = self.attend(query, used, sight, scale=scale, deterministic=deterministic)
        context = context.swapaxes(1, 2).reshape(*hidden.shape[:-1], width)
        return Attended(project(context, "out", embed, self.out_bias), weights, used)
