"""The dense layer of the shared blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax


def dense(
    features: int,
    *,
    initializer_range: float,
    use_bias: bool = True,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
    name: str,
) -> nn.Dense:
    """Return a Dense layer with normal initial weights of that deviation."""
    return nn.Dense(
        features,
        use_bias=use_bias,
        kernel_init=nn.initializers.normal(initializer_range),
        dtype=dtype,
        param_dtype=param_dtype,
        dot_general=_rows_by_kernel,
        name=name,
    )


class FusedDense(nn.Module):
    """`count` dense layers in one product. Its kernel is `[embed, count, features]`, so that each can be split."""

    count: int
    features: int
    initializer_range: float
    use_bias: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: jax.Array) -> list[jax.Array]:
        """Return `count` arrays `[..., features]` for `values` `[..., embed]`."""
        init = nn.initializers.normal(self.initializer_range)
        shape = (values.shape[-1], self.count, self.features)
        kernel = self.param("kernel", init, shape, self.param_dtype)
        values, kernel = nn.dtypes.promote_dtype(values, kernel, dtype=self.dtype)
        rows = values.reshape(-1, shape[0])
        product = lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())))  # [rows, count, features]
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape[1:], self.param_dtype)
            product = product + bias.astype(product.dtype)[None]
        return [part.reshape(*values.shape[:-1], self.features) for part in jnp.unstack(product, axis=1)]


def _rows_by_kernel(values: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
    """Multiply `[..., embed]` with `[embed, features]` as one matrix of rows.

    With its axes apart, XLA for CPU transposes the wider of the two factors of the kernel's gradient.
    """
    rows = values.reshape(-1, values.shape[-1])
    product = lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **options)
    return product.reshape(*values.shape[:-1], kernel.shape[-1])
