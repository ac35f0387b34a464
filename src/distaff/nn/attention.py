"""Multi-head attention."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.mesh import constrain
from distaff.nn.attend import attend
from distaff.nn.cache import KeyValue
from distaff.nn.dense import FusedDense, dense
from distaff.nn.dropout import Dropout


class Attended(NamedTuple):
    """`hidden` `[batch, queries, embed]`, `weights` `[batch, heads, queries, keys]`, and the keys and values used."""

    hidden: jax.Array
    weights: jax.Array
    used: KeyValue


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017) of `hidden` over itself, or over `source`.

    head_dim: width of a head, by default `embed / num_heads`. scale: factor on the scores, by default
    `head_dim ** -0.5`. use_bias: of the projections of queries, keys and values; out_bias: of that back to `embed`.
    fused: one projection "qkv", with an axis of three, instead of "query", "key" and "value". float32_scores: see
    `attend`.
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
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def attend(
        self, query: jax.Array, used: KeyValue, bias: Any, *, scale: jax.Array | float, deterministic: bool
    ) -> tuple[jax.Array, Any]:
        """Return `[batch, heads, queries, head_dim]` and the weights; a family may attend otherwise."""
        dropout = Dropout(self.dropout_rate, deterministic=deterministic)
        return attend(
            query,
            used.key,
            used.value,
            bias=bias,
            scale=scale,
            dropout=dropout,
            float32_scores=self.float32_scores,
        )

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,
        bias: jax.Array | None = None,
        *,
        deterministic: bool,
        source: jax.Array | None = None,
        kept: KeyValue | None = None,
        start: jax.Array | None = None,
        scale: jax.Array | float | None = None,
    ) -> Attended:
        """Attend with `hidden` `[batch, queries, embed]`.

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
        context, weights = self.attend(query, used, bias, scale=scale, deterministic=deterministic)
        context = context.swapaxes(1, 2).reshape(*hidden.shape[:-1], width)
        return Attended(project(context, "out", embed, self.out_bias), weights, used)
