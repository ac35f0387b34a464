"""The exponential moving average of the parameters, which is what is evaluated and saved where a run keeps one.

It starts as the parameters and follows them the faster the younger it is: its decay after step n, counted from 0, is
`min(decay, (1 + n) / (10 + n))`. So TensorFlow's `ExponentialMovingAverage` (with its number of updates), Diffusers and
timm do it, and random starting values are soon forgotten.
"""

import jax
import jax.numpy as jnp

from distaff.core.errors import UsageError
from distaff.core.tree import Tree


def start_average(params: Tree) -> Tree:
    """Return the average before the first step, in float32 at least: bfloat16 would lose what a step adds."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params)


def follow(average: Tree, params: Tree, *, step: jax.Array, decay: float) -> Tree:
    """Return the average after a step that led to `params`; `step` is how many steps were done before it."""
    rate = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    # In this form a parameter that stays, such as a frozen one, is its own average to the last bit.
    return jax.tree.map(
        lambda mean, leaf: mean + rate.astype(mean.dtype) * (leaf.astype(mean.dtype) - mean), average, params
    )


def check_decay(decay: float | None) -> None:
    """Raise `UsageError` for a decay that averages nothing."""
    if decay is not None and not 0 < decay < 1:
        raise UsageError(f"ema_decay is {decay}: it must be above 0 and below 1, or left out.")
