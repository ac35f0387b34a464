"""Optimizers and learning rate schedules by the names of the old scripts' flags."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from distaff.core.errors import UsageError
from distaff.core.tree import Tree
from distaff.train.step import Schedule

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")

# Without a warm-up, 1 / sqrt needs a step at which it is one; this is the value of T5's and Transformers' schedule.
INVERSE_SQRT_TIMESCALE = 10_000


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and how its rate runs.

    learning_rate: the peak. warmup_steps: over how many optimizer steps the rate rises to it from zero.
    weight_decay: decoupled (times the rate), on the parameters that the mask names; Adafactor too.
    max_grad_norm: gradients of a larger global norm are scaled down to it; None leaves them alone.
    adafactor: instead of AdamW, with optax's settings and so with the parameters' scale in the step size.
    """

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    adafactor: bool = False
    warmup_steps: int = 0
    lr_scheduler_type: str = "linear"
    max_grad_norm: float | None = None


def make_optimizer(
    config: OptimizerConfig, *, total_steps: int, decay_mask: Tree | None = None, trained: Tree | None = None
) -> tuple[optax.GradientTransformation, Schedule]:
    """Return the optax optimizer and its schedule (a function of the number of steps done).

    `decay_mask` has the structure of the parameters, True where weight decay applies; None decays all of them.
    `trained` likewise, False where a parameter stays as it is: the optimizer keeps nothing for it then, and its
    gradient does not count in the norm that is clipped.
    """
    schedule = make_schedule(config, total_steps=total_steps)
    if config.adafactor:
        # A rate of decay that follows the schedule: optax adds it after the step size, so it is not scaled there.
        decay = (lambda count: config.weight_decay * schedule(count)) if config.weight_decay else None
        tx = optax.adafactor(learning_rate=schedule, weight_decay_rate=decay, weight_decay_mask=decay_mask)
    else:
        tx = optax.adamw(
            learning_rate=schedule,
            b1=config.adam_beta1,
            b2=config.adam_beta2,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    if config.max_grad_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), tx)
    if trained is not None:
        labels = jax.tree.map(lambda learns: "trained" if learns else "frozen", trained)
        tx = optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)
    return tx, schedule


def make_schedule(config: OptimizerConfig, *, total_steps: int) -> Schedule:
    """Return the learning rate as a function of the number of steps done; finite at every step.

    Raises UsageError for an unknown name and for a warm-up that is longer than the training.
    """
    check_optimizer(config)
    name, warmup, peak = config.lr_scheduler_type, config.warmup_steps, config.learning_rate
    if total_steps < 1:
        raise UsageError(f"Training needs at least one step, not {total_steps}.")
    if not 0 <= warmup <= total_steps:
        raise UsageError(f"warmup_steps {warmup} must lie between 0 and the {total_steps} steps of the training.")
    if name == "constant" and warmup:
        raise UsageError(f"'constant' has no warm-up: use 'constant_with_warmup' for warmup_steps {warmup}.")
    timescale = warmup or INVERSE_SQRT_TIMESCALE

    def after_warmup(step: Any) -> Any:
        progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
        if name == "linear":
            return 1.0 - progress
        if name == "cosine":
            return 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        if name == "inverse_sqrt":
            return jnp.sqrt(timescale / (timescale + jnp.maximum(step - warmup, 0.0)))
        return jnp.ones_like(progress)

    def schedule(count: Any) -> Any:
        step = jnp.asarray(count, jnp.float32)
        return peak * jnp.where(step < warmup, step / max(warmup, 1), after_warmup(step))

    return schedule


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise UsageError for the first value that no optimizer can work with."""
    if config.lr_scheduler_type not in SCHEDULES:
        raise UsageError(
            f"lr_scheduler_type '{config.lr_scheduler_type}' is not known: choose one of {', '.join(SCHEDULES)}."
        )
    limits = {
        "learning_rate": (0 <= config.learning_rate < math.inf, "zero or more, and finite"),
        "weight_decay": (0 <= config.weight_decay < math.inf, "zero or more, and finite"),
        "adam_beta1": (0 <= config.adam_beta1 < 1, "at least 0 and below 1"),
        "adam_beta2": (0 <= config.adam_beta2 < 1, "at least 0 and below 1"),
        "adam_epsilon": (0 < config.adam_epsilon < math.inf, "above zero, and finite"),
        "max_grad_norm": (config.max_grad_norm is None or config.max_grad_norm > 0, "above zero, or None"),
    }
    for name, (holds, expected) in limits.items():
        if not holds:
            raise UsageError(f"{name} must be {expected}, not {getattr(config, name)}.")
