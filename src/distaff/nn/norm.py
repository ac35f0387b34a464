"""Normalisation with the epsilon always named."""

from typing import Literal

import jax.numpy as jnp
from flax import linen as nn

Norm = Literal["layer", "rms"]


def layer_norm(*, eps: float, dtype, param_dtype=jnp.float32, name: str | None = None) -> nn.LayerNorm:
    """Return a LayerNorm (Ba et al. 2016) whose statistics are float32 whatever `dtype` is.

    The variance is computed as in PyTorch, from the centred values: E[x²] - E[x]² cancels for large means.
    """
    return nn.LayerNorm(epsilon=eps, dtype=dtype, param_dtype=param_dtype, use_fast_variance=False, name=name)


def rms_norm(*, eps: float, dtype, param_dtype=jnp.float32, name: str | None = None) -> nn.RMSNorm:
    """Return an RMSNorm (Zhang & Sennrich 2019), T5's norm, whose statistics are float32 whatever `dtype` is."""
    return nn.RMSNorm(epsilon=eps, dtype=dtype, param_dtype=param_dtype, name=name)


def norm_of(kind: Norm, *, eps: float, dtype, param_dtype=jnp.float32, name: str | None = None) -> nn.Module:
    """Return the norm that `kind` names."""
    make = layer_norm if kind == "layer" else rms_norm
    return make(eps=eps, dtype=dtype, param_dtype=param_dtype, name=name)
