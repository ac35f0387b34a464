"""One Transformer layer."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.nn.attention import Attention
from distaff.nn.mlp import MLP
from distaff.nn.norm import layer_norm


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each with dropout, a residual and a norm after ("post") or before it ("pre")."""

    num_heads: int
    intermediate_size: int
    activation: str
    norm_eps: float
    norm_order: Literal["pre", "post"]
    dropout_rate: float
    attention_dropout_rate: float
    initializer_range: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, bias: jax.Array | None, deterministic: bool) -> tuple[jax.Array, jax.Array]:
        """Return `([batch, length, embed], attention weights [batch, heads, length, length])`."""
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        attention = Attention(
            self.num_heads, self.attention_dropout_rate, self.initializer_range, **dtypes, name="attention"
        )
        mlp = MLP(self.intermediate_size, self.activation, self.initializer_range, **dtypes, name="mlp")
        attention_norm = layer_norm(eps=self.norm_eps, **dtypes, name="attention_norm")
        mlp_norm = layer_norm(eps=self.norm_eps, **dtypes, name="mlp_norm")

        def dropout(values: jax.Array) -> jax.Array:
            return nn.Dropout(self.dropout_rate)(values, deterministic=deterministic)

        if self.norm_order == "post":
            attended, weights = attention(hidden, bias, deterministic=deterministic)
            hidden = attention_norm(hidden + dropout(attended))
            return mlp_norm(hidden + dropout(mlp(hidden))), weights
        attended, weights = attention(attention_norm(hidden), bias, deterministic=deterministic)
        hidden = hidden + dropout(attended)
        return hidden + dropout(mlp(mlp_norm(hidden))), weights
