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
OPTIMIZERS = ("adamw", "adafactor", "lion", "sgd", "sm3", "muon")
MOMENT_DTYPES = ("float32", "bfloat16")
# Which optimizers read a setting that not all of them read.
READERS = {
    "adam_beta1": ("adamw", "lion", "muon"),
    "adam_beta2": ("adamw", "lion", "muon"),
    "adam_epsilon": ("adamw", "muon"),
    "sgd_momentum": ("sgd",),
    "moment_dtype": ("adamw", "lion", "sgd", "muon"),
}

# Without a warm-up, 1 / sqrt needs a step at which it is one; this is the value of T5's and Transformers' schedule.
INVERSE_SQRT_TIMESCALE = 10_000
# Root mean square of AdamW's steps, to which Muon's are scaled (arXiv 2502.16982, section 2.2).
ADAMW_STEP = 0.2


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and how its rate runs.

    optimizer: one of `OPTIMIZERS`; None is AdamW. adafactor: the old scripts' word for optimizer="adafactor".
    learning_rate: the peak. warmup_steps: over how many optimizer steps the rate rises to it from zero.
    weight_decay: decoupled (times the rate), on the parameters that the mask names; of every optimizer.
    adam_beta1, adam_beta2: of AdamW, of what Muon leaves to AdamW, and of Lion; None is 0.999, and 0.99 for Lion.
    adam_epsilon: of AdamW. sgd_momentum: 0 for none.
    moment_dtype: of the first moment or momentum; None is the parameters' own. The second moment has the parameters'.
    max_grad_norm: gradients of a larger global norm are scaled down to it; None leaves them alone.

    Adafactor has optax's settings, so the parameters' scale is in its step size; SM3 and Muon have optax's momentum.
    """

    optimizer: str | None = None
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float | None = None
    adam_epsilon: float = 1e-8
    sgd_momentum: float = 0.9
    moment_dtype: str | None = None
    adafactor: bool = False
    warmup_steps: int = 0
    lr_scheduler_type: str = "linear"
    max_grad_norm: float | None = None

    @property
    def name(self) -> str:
        """The optimizer's name, however it was said."""
        return "adafactor" if self.adafactor else self.optimizer or "adamw"

    @property
    def beta2(self) -> float:
        """`adam_beta2`, or what the optimizer's paper has."""
        return (0.99 if self.name == "lion" else 0.999) if self.adam_beta2 is None else self.adam_beta2

    def read(self) -> dict[str, Any]:
        """Return the values of the settings that this optimizer reads and not all do."""
        values = {setting: getattr(self, setting) for setting, names in READERS.items() if self.name in names}
        return values | ({"adam_beta2": self.beta2} if "adam_beta2" in values else {})


def make_optimizer(
    config: OptimizerConfig,
    *,
    total_steps: int,
    decay_mask: Tree | None = None,
    matrices: Tree | None = None,
    trained: Tree | None = None,
) -> tuple[optax.GradientTransformation, Schedule]:
    """Return the optax optimizer and its schedule (a function of the number of steps done).

    `decay_mask` has the structure of the parameters, True where weight decay applies; None decays all of them.
    `matrices` likewise, of those whose steps Muon makes the axis of what goes in: -2 (or True) for kernels
    `[..., in, out]`, -3 for several in one, `[..., in, parts, out]`, and 0 (False) for all that is AdamW's. None is all
    arrays of two dimensions.
    `trained` likewise, False where a parameter stays as it is: the optimizer keeps nothing for it then, and its
    gradient does not count in the norm that is clipped.
    """
    schedule = make_schedule(config, total_steps=total_steps)
    if matrices is not None and trained is not None:
        matrices = jax.tree.map(lambda matrix, learns: matrix if learns else 0, matrices, trained)
    if config.name == "adafactor":
        # A rate of decay that follows the schedule: optax adds it after the step size, so it is not scaled there.
        decay = (lambda count: config.weight_decay * schedule(count)) if config.weight_decay else None
        tx = optax.adafactor(learning_rate=schedule, weight_decay_rate=decay, weight_decay_mask=decay_mask)
    else:
        # For AdamW and Lion this is optax's own chain; with it the decay of the others is decoupled as theirs is.
        tx = optax.chain(
            _direction(config, matrices),
            optax.add_decayed_weights(config.weight_decay, decay_mask),
            optax.scale_by_learning_rate(schedule),
        )
    if config.max_grad_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), tx)
    if trained is not None:
        labels = jax.tree.map(lambda learns: "trained" if learns else "frozen", trained)
        tx = optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)
    return tx, schedule


def _direction(config: OptimizerConfig, matrices: Tree | None) -> optax.GradientTransformation:
    """Return what makes steps of gradients, before decay and rate."""
    betas = {"b1": config.adam_beta1, "b2": config.beta2}
    adam = optax.scale_by_adam(**betas, eps=config.adam_epsilon, mu_dtype=config.moment_dtype)
    match config.name:
        case "lion":
            return optax.scale_by_lion(**betas, mu_dtype=config.moment_dtype)
        case "sgd":
            if not config.sgd_momentum:
                return optax.identity()
            return optax.trace(config.sgd_momentum, accumulator_dtype=config.moment_dtype)
        case "sm3":
            return _sm3()
        case "muon":
            labels = _labels_by_rank if matrices is None else _muon_labels(matrices)
            kinds = {str(axis): _muon(config.moment_dtype, axis) for axis in (-2, -3)}
            return optax.partition({"adamw": adam, **kinds}, labels)
    return adam


def _sm3() -> optax.GradientTransformation:
    """SM3 of optax, which knows no parameters without dimensions: they have one here."""
    inner = optax.scale_by_sm3()

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        steps, state = inner.update(jax.tree.map(jnp.atleast_1d, updates), state)
        return jax.tree.map(lambda step, like: step.reshape(like.shape), steps, updates), state

    return optax.GradientTransformation(lambda params: inner.init(jax.tree.map(jnp.atleast_1d, params)), update)


def _muon(moment_dtype: str | None, entering: int) -> optax.GradientTransformation:
    """Muon's steps for kernels whose axes are `entering` and the last, as large as AdamW's: one rate serves both."""

    def axes(updates: Tree) -> Tree:
        # Axes that are not named are of a stack, whose matrices are made orthogonal one by one.
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(entering, -1), updates)

    def scaled(updates: Tree, params: Tree | None) -> Tree:
        def one(step: jax.Array) -> jax.Array:
            return step * (ADAMW_STEP * math.sqrt(max(step.shape[entering], step.shape[-1])))

        return jax.tree.map(one, updates)

    orthogonal = optax.contrib.scale_by_muon(mu_dtype=moment_dtype, weight_dimension_numbers=axes)
    return optax.chain(orthogonal, optax.stateless(scaled))


def _muon_labels(matrices: Tree) -> Tree:
    """Return "adamw" or the axis of what goes in for each parameter; `UsageError` where Muon would have none."""
    if not any(jax.tree.leaves(matrices)):
        raise UsageError(
            "Muon makes the steps of matrices in layers, and this model trains none: take another optimizer."
        )
    return jax.tree.map(lambda axis: str(-2 if axis is True else axis) if axis else "adamw", matrices)


def _labels_by_rank(params: Tree) -> Tree:
    return _muon_labels(jax.tree.map(lambda leaf: jnp.ndim(leaf) == 2, params))


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
    """Raise UsageError for the first value that the optimizer cannot work with, or would not read."""
    if config.optimizer not in (None, *OPTIMIZERS):
        raise UsageError(f"optimizer '{config.optimizer}' is not known: choose one of {', '.join(OPTIMIZERS)}.")
    if config.adafactor and config.optimizer not in (None, "adafactor"):
        raise UsageError(f"adafactor and optimizer '{config.optimizer}' are two optimizers: give one.")
    if config.lr_scheduler_type not in SCHEDULES:
        raise UsageError(
            f"lr_scheduler_type '{config.lr_scheduler_type}' is not known: choose one of {', '.join(SCHEDULES)}."
        )
    limits = {
        "learning_rate": (0 <= config.learning_rate < math.inf, "zero or more, and finite"),
        "weight_decay": (0 <= config.weight_decay < math.inf, "zero or more, and finite"),
        "adam_beta1": (0 <= config.adam_beta1 < 1, "at least 0 and below 1"),
        "adam_beta2": (config.adam_beta2 is None or 0 <= config.adam_beta2 < 1, "at least 0 and below 1"),
        "adam_epsilon": (0 < config.adam_epsilon < math.inf, "above zero, and finite"),
        "sgd_momentum": (0 <= config.sgd_momentum < 1, "at least 0 and below 1"),
        "moment_dtype": (config.moment_dtype in (None, *MOMENT_DTYPES), f"{' or '.join(MOMENT_DTYPES)}"),
        "max_grad_norm": (config.max_grad_norm is None or config.max_grad_norm > 0, "above zero, or None"),
    }
    for name, (holds, expected) in limits.items():
        if not holds:
            raise UsageError(f"{name} must be {expected}, not {getattr(config, name)}.")
    for name, readers in READERS.items():
        if config.name not in readers and getattr(config, name) != getattr(OptimizerConfig, name):
            raise UsageError(f"{name} is of {', '.join(readers)} and does nothing under {config.name}: leave it out.")
    if config.name == "sgd" and not config.sgd_momentum and config.moment_dtype is not None:
        raise UsageError("moment_dtype is of a momentum, and sgd_momentum is 0: leave it out.")
