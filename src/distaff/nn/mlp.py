"""The position-wise feed-forward block."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.mesh import constrain
from distaff.nn.act import ACTIVATIONS
from distaff.nn.dense import dense
from distaff.nn.dropout import Dropout


class MLP(nn.Module):
    """Two dense layers with an activation between (Vaswani et al. 2017, section 3.3).

    With `gated`, the activation of a third one, "gate", multiplies the inner values (Shazeer 2020). `dropout_rate`
    acts on the inner values.
    """

    intermediate_size: int
    activation: str
    initializer_range: float
    use_bias: bool = True
    gated: bool = False
    dropout_rate: float = 0.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Map `[batch, length, embed]` to the same shape."""

        def project(features: int, name: str) -> nn.Dense:
            return dense(
                features,
                initializer_range=self.initializer_range,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
            )

        activation = ACTIVATIONS[self.activation]
        inner = project(self.intermediate_size, "up")(hidden)  # [batch, length, mlp]
        gate = project(self.intermediate_size, "gate")(hidden) if self.gated else None
        inner = activation(inner) if gate is None else activation(gate) * inner
        inner = constrain(inner, "batch", None, "mlp")
        inner = Dropout(self.dropout_rate)(inner, deterministic=deterministic)
        return project(hidden.shape[-1], "down")(inner)
