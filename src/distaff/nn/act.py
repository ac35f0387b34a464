"""Activations by the names of Hugging Face configs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]

_gelu_tanh = partial(jax.nn.gelu, approximate=True)

# "gelu" is the exact one (erf); the tanh approximation has names of its own.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_python": partial(jax.nn.gelu, approximate=False),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_10": lambda x: jnp.clip(jax.nn.gelu(x, approximate=False), -10.0, 10.0),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "linear": lambda x: x,
}
