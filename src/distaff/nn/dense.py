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


def _rows_by_kernel(values: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
    """Multiply `[..., embed]` with `[embed, features]` as one matrix of rows.

    With its axes apart, XLA for CPU transposes the wider of the two factors of the kernel's gradient.
    """
    rows = values.reshape(-1, values.shape[-1])
    product = lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **options)
    return product.reshape(*values.shape[:-1], kernel.shape[-1])
