"""Sums and their weights: added over micro-batches, steps and batches, divided once."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

# A name -> (sum, weight), both float32 scalars.
Sums = dict[str, tuple[jax.Array, jax.Array]]

# The step number that stands for "none": later than any step.
NO_STEP = 2**31 - 1


@struct.dataclass
class StepMetrics:
    """What one step, or the steps since the last log, measured on the devices.

    sums: what the loss function returned, and `grad_norm` (before clipping) with the weight one.
    learning_rate: of the latest step; None when the schedule is not known.
    bad_step: the first step whose loss or gradient was not finite, else NO_STEP; int32 scalar.
    """

    sums: Sums
    learning_rate: jax.Array | None
    bad_step: jax.Array


@jax.jit
def add_steps(window: StepMetrics, step: StepMetrics) -> StepMetrics:
    """Add the metrics of the next step to those of the steps before it."""
    return StepMetrics(
        sums=jax.tree.map(jnp.add, window.sums, step.sums),
        learning_rate=step.learning_rate,
        bad_step=jnp.minimum(window.bad_step, step.bad_step),
    )


def divide(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """Return sum / weight for each name, on the host. A name of weight zero has no value and is left out."""
    return {name: float(total) / float(weight) for name, (total, weight) in sums.items() if float(weight) != 0.0}


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
