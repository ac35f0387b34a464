"""Normalisation with the epsilon always named, in float32 whatever the dtype of the result is.

The values are divided by their deviation, not multiplied with its inverse: XLA computes products again wherever they
are read, in the backward pass from the sums of all residuals before them, but a division once.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.errors import DataError

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


class BatchNorm(nn.Module):
    """Normalisation of each channel (Ioffe & Szegedy 2015), with running statistics as PyTorch keeps them.

    While training, a channel is normalised by mean and variance of the batch; the running ones, in the collection
    "batch_stats", move to them by `rate`, to the variance in its unbiased form (n - 1), and `count` counts the batches.
    Otherwise the running ones are used. Under `jit` the batch is the global one, on however many devices it lies.
    Statistics are float32 whatever `dtype` is.
    """

    rate: float = 0.1
    eps: float = 1e-5
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: jax.Array, row_mask: jax.Array | None = None, *, deterministic: bool) -> jax.Array:
        """Normalise `[batch, ..., channels]`; rows whose `row_mask` `[batch]` is zero count in no statistics."""
        channels = values.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, channels, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, channels, self.param_dtype)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        count = self.variable("batch_stats", "count", jnp.zeros, (), jnp.float32)
        wide = values.astype(jnp.float32)
        if deterministic:
            mean, variance = running_mean.value, running_var.value
        else:
            mean, variance, number = _moments(wide, row_mask)
            # A batch of masked rows alone says nothing: it is normalised by what is known and leaves that as it is.
            some = jnp.minimum(number, 1.0)
            mean = jnp.where(some > 0, mean, running_mean.value)
            variance = jnp.where(some > 0, variance, running_var.value)
            rate = self.rate * some
            unbiased = variance * (number / jnp.maximum(number - 1.0, 1.0))
            if not self.is_initializing():
                running_mean.value = (1.0 - rate) * running_mean.value + rate * mean
                running_var.value = (1.0 - rate) * running_var.value + rate * unbiased
                count.value = count.value + some
        factor = jax.lax.rsqrt(variance.astype(jnp.float32) + self.eps) * scale.astype(jnp.float32)
        shift = bias.astype(jnp.float32) - mean * factor
        return (wide * _along(factor, values) + _along(shift, values)).astype(self.dtype)


def _moments(values: jax.Array, row_mask: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean and variance `[channels]` of `[batch, ..., channels]`, and of how many values a channel they are."""
    axes = tuple(range(values.ndim - 1))
    number = values.size // values.shape[-1]
    if number < 2:
        raise DataError(
            f"BatchNorm has {number} value for each channel of {list(values.shape)}, which leaves nothing to train on: "
            "give it more images, or larger ones."
        )
    if row_mask is None:
        mean = values.mean(axes)
        return mean, jnp.square(values - _along(mean, values)).mean(axes), jnp.float32(number)
    weights = row_mask.astype(jnp.float32)
    each = weights.reshape(-1, *(1,) * (values.ndim - 1))
    real = weights.sum() * (number // values.shape[0])
    mean = (values * each).sum(axes) / jnp.maximum(real, 1.0)
    variance = (jnp.square(values - _along(mean, values)) * each).sum(axes) / jnp.maximum(real, 1.0)
    return mean, variance, real
