"""Normalisation with the epsilon always named, in float32 whatever the dtype of the result is.

The values are divided by their deviation, not multiplied with its inverse: XLA computes products again wherever they
are read, in the backward pass from the sums of all residuals before them, but a division once.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

Norm = Literal["layer", "rms"]


class LayerNorm(nn.Module):
    """LayerNorm (Ba et al. 2016). Its variance is that of centred values, as in PyTorch: E[x²] - E[x]² cancels."""

    eps: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        """Normalise over the last axis."""
        scale = self.param("scale", nn.initializers.ones, values.shape[-1:], self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, values.shape[-1:], self.param_dtype)
        centred = jnp.asarray(values, jnp.float32)
        centred = centred - centred.mean(axis=-1, keepdims=True)
        return (_by_deviation(centred, self.eps) * _along(scale, values) + _along(bias, values)).astype(self.dtype)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), T5's norm."""

    eps: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        """Normalise over the last axis."""
        scale = self.param("scale", nn.initializers.ones, values.shape[-1:], self.param_dtype)
        return (_by_deviation(jnp.asarray(values, jnp.float32), self.eps) * _along(scale, values)).astype(self.dtype)


def _by_deviation(values: jax.Array, eps: float) -> jax.Array:
    return values / jnp.sqrt(jnp.square(values).mean(axis=-1, keepdims=True) + eps)


def _along(vector: jax.Array, values: jax.Array) -> jax.Array:
    """Give `vector` the rank of `values`, in float32."""
    return jnp.expand_dims(jnp.asarray(vector, jnp.float32), range(values.ndim - 1))


def norm_of(kind: Norm, *, eps: float, dtype, param_dtype=jnp.float32, name: str | None = None) -> nn.Module:
    """Return the norm that `kind` names."""
    return (LayerNorm if kind == "layer" else RMSNorm)(eps, dtype, param_dtype, name=name)
