"""The position-wise feed-forward block."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.nn.act import ACTIVATIONS


class MLP(nn.Module):
    """Two dense layers with an activation between (Vaswani et al. 2017, section 3.3)."""

    intermediate_size: int
    activation: str
    initializer_range: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Map `[batch, length, embed]` to the same shape."""

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(
                features,
                kernel_init=nn.initializers.normal(self.initializer_range),
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
            )

        inner = ACTIVATIONS[self.activation](dense(self.intermediate_size, "up")(hidden))  # [batch, length, mlp]
        return dense(hidden.shape[-1], "down")(inner)
