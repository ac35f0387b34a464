"""The jitted training and evaluation steps, made from a loss function.

A loss function is `loss_fn(params, batch, rng) -> {name: (sum, weight)}` with float32 scalars. The gradient is that of
the sum of "loss", divided by its total weight over all rows, micro-batches and devices. `rng` is None in evaluation.

Where the state carries something (running statistics), it is `loss_fn(params, batch, rng, carried) -> (sums, carried)`:
each micro-batch gets what the one before it returned; an evaluation gets what there is, and what it returns is dropped.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from distaff.core.errors import DistaffError, UsageError
from distaff.core.mesh import batch_devices, batch_sharding, place, replicated
from distaff.core.tree import Tree
from distaff.train.average import follow
from distaff.train.metrics import NO_STEP, StepMetrics, Sums
from distaff.train.state import TrainState, shardings_of

LossFunction = Callable[..., Any]
Schedule = Callable[[Any], Any]
TrainStep = Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]
EvalStep = Callable[..., Sums]


def make_train_step(
    loss_fn: LossFunction,
    tx: optax.GradientTransformation,
    *,
    state: TrainState | None = None,
    accumulation: int = 1,
    schedule: Schedule | None = None,
    donate: bool = True,
    ema_decay: float | None = None,
) -> TrainStep:
    """Return the jitted `train_step(state, batch) -> (state, metrics)`; it takes over the buffers of its state.

    With `accumulation` above one the leaves of a batch are `[accumulation, rows, ...]`, else `[rows, ...]`, as
    `place_rows` makes them. `state` pins where the next state lies; without it the compiler chooses, which is fine on
    one device. `schedule` is only reported. `donate=False` keeps the state that is passed in. `ema_decay`: of the
    average, for a state that has one.
    """

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        grads, sums, carried = _gradients(loss_fn, state, batch, rng, accumulation)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norm = optax.tree.norm(grads).astype(jnp.float32)
        finite = jnp.isfinite(sums["loss"][0]) & jnp.isfinite(norm)
        metrics = StepMetrics(
            sums={**sums, "grad_norm": (norm, jnp.ones((), jnp.float32))},
            learning_rate=None if schedule is None else jnp.asarray(schedule(state.step), jnp.float32),
            bad_step=jnp.where(finite, NO_STEP, state.step + 1).astype(jnp.int32),
        )
        average = None if ema_decay is None else follow(state.average, params, step=state.step, decay=ema_decay)
        after = {"params": params, "opt_state": opt_state, "carried": carried, "average": average}
        return TrainState(step=state.step + 1, rng=state.rng, **after), metrics

    outputs = None if state is None else (shardings_of(state), state.step.sharding)
    return jax.jit(train_step, donate_argnums=(0,) if donate else (), out_shardings=outputs)


@partial(jax.jit, static_argnums=0)
def eval_step(loss_fn: LossFunction, params: Tree, batch: Any, carried: Tree = None) -> Sums:
    """Return the sums of one batch without dropout; compiled once for a loss function and a shape of batch."""
    return _sums(loss_fn, params, batch, None, carried)[0]


def make_eval_step(loss_fn: LossFunction) -> EvalStep:
    """Return the jitted `eval_step(params, batch, carried=None) -> {name: (sum, weight)}`. Nothing is donated."""
    return partial(eval_step, loss_fn)


def place_rows(batch: Tree, mesh: Mesh, *, accumulation: int = 1) -> Tree:
    """Put this process's rows of a global batch on the devices of `mesh`.

    The leaves are host arrays `[accumulation * rows, ...]`; they come back as `[rows, ...]`, or with accumulation as
    `[accumulation, rows, ...]`, the rows split over the devices. Raises UsageError if they cannot be.
    """
    local = max(batch_devices(mesh) // jax.process_count(), 1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or leaf.shape[0] == 0 or leaf.shape[0] % (accumulation * local):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UsageError(
                f"Batch array '{name}' of shape {leaf.shape} cannot be split into {accumulation} micro-batches over "
                f"{local} devices: its first dimension must be a multiple of {accumulation * local}."
            )
    if accumulation == 1:
        return place(batch, batch_sharding(mesh))
    rows = jax.tree.map(lambda leaf: leaf.reshape(accumulation, -1, *leaf.shape[1:]), batch)
    return place(rows, batch_sharding(mesh, leading=1))


def planned_rows(batch: Tree, mesh: Mesh, *, accumulation: int = 1) -> Tree:
    """Return what `place_rows` makes of a batch, as shapes; its leaves need a shape and a dtype alone."""
    sharding = batch_sharding(mesh, leading=int(accumulation > 1))

    def planned(leaf: Any) -> jax.ShapeDtypeStruct:
        rows, *rest = leaf.shape
        leading = (rows,) if accumulation == 1 else (accumulation, rows // accumulation)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((*leading, *rest), dtype, sharding=sharding)

    return jax.tree.map(planned, batch)


def place_eval_rows(batch: Tree, mesh: Mesh) -> Tree:
    """Like `place_rows`, but rows that do not divide over the devices go whole to each (in one process only)."""
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim}
    if jax.process_count() == 1 and any(count % batch_devices(mesh) for count in rows):
        return place(batch, replicated(mesh))
    return place_rows(batch, mesh)


@contextmanager
def debugging_nans(what: str = "the run") -> Iterator[None]:
    """Stop `what` at the first operation that yields a NaN, as a DistaffError with the operation's name.

    A step must keep its state here (`donate=False`): the operation is found by running the step again piece by piece.
    """
    with jax.debug_nans(True):
        try:
            yield
        except FloatingPointError as error:
            raise DistaffError(f"A NaN stopped {what}: {str(error).splitlines()[0].rstrip('. ')}.") from error


def _gradients(
    loss_fn: LossFunction, state: TrainState, batch: Any, rng: jax.Array, accumulation: int
) -> tuple[Tree, Sums, Tree]:
    """Return the gradient of the mean loss, in the dtypes of the parameters, the sums of it, and what is carried on."""
    params = state.params

    def loss_sum(params: Tree, rows: Any, key: jax.Array, carried: Tree) -> tuple[jax.Array, tuple[Sums, Tree]]:
        sums, carried = _sums(loss_fn, params, rows, key, carried)
        return sums["loss"][0], (sums, carried)

    gradient = jax.grad(loss_sum, has_aux=True)
    if accumulation == 1:
        grads, (sums, carried) = gradient(params, batch, rng, state.carried)
    else:

        def add(before: tuple[Tree, Tree], micro: tuple[jax.Array, Any]) -> tuple[tuple[Tree, Tree], Sums]:
            total, carried = before
            index, rows = micro
            grads, (sums, carried) = gradient(params, rows, jax.random.fold_in(rng, index), carried)
            return (jax.tree.map(lambda whole, part: whole + part.astype(whole.dtype), total, grads), carried), sums

        # Sums of many bfloat16 gradients lose their small parts: add in float32 at least.
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), params)
        (grads, carried), stacked = jax.lax.scan(add, (zeros, state.carried), (jnp.arange(accumulation), batch))
        sums = jax.tree.map(lambda parts: parts.sum(axis=0), stacked)
    weight = sums["loss"][1]
    # A step without any weight has gradients of zero, not of zero by zero.
    scale = 1.0 / jnp.where(weight == 0, 1.0, weight)
    grads = jax.tree.map(lambda grad, leaf: (grad * scale).astype(leaf.dtype), grads, params)
    return grads, sums, carried


def _sums(loss_fn: LossFunction, params: Tree, rows: Any, key: jax.Array | None, carried: Tree) -> tuple[Sums, Tree]:
    """Return what the loss function answers; in training, what it carries on must look like what it was given."""
    if carried is None:
        return _checked(loss_fn(params, rows, key)), None
    answer = loss_fn(params, rows, key, carried)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise UsageError(
            f"A loss function with something to carry returns (sums, carried), not a {type(answer).__name__}."
        )
    sums, new = answer
    if key is not None and _looks(new) != _looks(carried):
        raise UsageError(
            "What a loss function carries on must have the structure, shapes and dtypes of what it was given: return "
            "its `carried` argument with new values."
        )
    return _checked(sums), new


def _looks(tree: Tree) -> Any:
    return jax.tree.structure(tree), [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]


def _checked(sums: Mapping[str, tuple[Any, Any]]) -> Sums:
    """Return what a loss function returned as float32 scalars; UsageError if it is something else."""
    if not isinstance(sums, Mapping) or "loss" not in sums:
        raise UsageError('A loss function returns a dict {"loss": (sum, weight), ...}; "loss" was missing.')
    checked: Sums = {}
    for name, pair in sums.items():
        if not isinstance(pair, tuple) or len(pair) != 2 or any(jnp.ndim(part) for part in pair):
            raise UsageError(f"'{name}' of the loss function must be a pair of scalars (sum, weight), not {pair!r}.")
        checked[name] = (jnp.asarray(pair[0], jnp.float32), jnp.asarray(pair[1], jnp.float32))
    return checked
