"""Multi-head attention.

Letters of the einsums: b batch, q queries, k keys, h heads, d head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.nn.attend import attend


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017) of `hidden` over itself."""

    num_heads: int
    dropout_rate: float
    initializer_range: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, hidden: jax.Array, bias: jax.Array | None = None, *, deterministic: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return `([batch, length, embed], weights [batch, heads, length, length])`."""
        embed = hidden.shape[-1]

        def project(name: str) -> nn.Dense:
            return nn.Dense(
                embed,
                kernel_init=nn.initializers.normal(self.initializer_range),
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
            )

        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(*projected.shape[:-1], self.num_heads, embed // self.num_heads)

        context, weights = attend(
            heads(project("query")(hidden)),
            heads(project("key")(hidden)),
            heads(project("value")(hidden)),
            bias=bias,
            scale=(embed // self.num_heads) ** -0.5,
            dropout=nn.Dropout(self.dropout_rate, deterministic=deterministic),
        )
        return project("out")(context.reshape(hidden.shape)), weights
