"""Layer normalisation with the epsilon always named."""

import jax.numpy as jnp
from flax import linen as nn


def layer_norm(*, eps: float, dtype, param_dtype=jnp.float32, name: str | None = None) -> nn.LayerNorm:
    """Return a LayerNorm (Ba et al. 2016) whose statistics are float32 whatever `dtype` is.

    The variance is computed as in PyTorch, from the centred values: E[x²] - E[x]² cancels for large means.
    """
    return nn.LayerNorm(epsilon=eps, dtype=dtype, param_dtype=param_dtype, use_fast_variance=False, name=name)
