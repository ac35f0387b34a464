"""What a training step needs on each device, from shapes alone: it is compiled, and nothing is allocated."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from distaff.core.mesh import on
from distaff.core.tree import Tree
from distaff.train.collectives import Collective, collectives
from distaff.train.exhausted import exhausted
from distaff.train.state import planned_state
from distaff.train.step import LossFunction, Schedule, make_train_step, planned_rows

# Batches on the devices besides that of the step under way: one of a step that was dispatched, two made ahead.
WAITING_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a device.

    parameters, optimizer, average, carried, batch: what lies there when a step begins; the step's state takes the place
    of the one before. peak: the most that the step has at once; None where that is not known.
    limit: what the device has, where the compiler says that it is too little; then there is no program, and
    `collectives` is empty.
    """

    parameters: int
    optimizer: int
    average: int
    carried: int
    batch: int
    peak: int | None
    limit: int | None = None
    collectives: tuple[Collective, ...] = ()

    @property
    def held(self) -> int:
        """What lies there from step to step, and the batch."""
        return self.parameters + self.optimizer + self.average + self.carried + self.batch

    @property
    def needed(self) -> int:
        """What a run needs, with the batches that wait; the least that it needs where the peak is not known."""
        return (self.held if self.peak is None else self.peak) + WAITING_BATCHES * self.batch

    @property
    def temporary(self) -> int | None:
        """Activations, gradients and whatever else there is during a step alone."""
        return None if self.peak is None else self.peak - self.held


def footprint(
    loss_fn: LossFunction,
    *,
    params: Tree,
    shardings: Tree,
    tx: optax.GradientTransformation,
    batch: Tree,
    mesh: Mesh,
    schedule: Schedule | None = None,
    carried: Tree = None,
    accumulation: int = 1,
    ema_decay: float | None = None,
    limit: int | None = None,
) -> Footprint:
    """Compile the step that `fit` makes of the same arguments and return what it needs.

    params, batch, carried: shapes and dtypes; those of the batch are `accumulation * rows` of the whole mesh, as they
    come from the data. shardings: of the parameters. The devices of `mesh` may be those of a described topology.
    limit: bytes of a device; where what is held is more than that already, nothing is compiled.
    """
    state = planned_state(params, tx, mesh=mesh, shardings=shardings, carried=carried, averaged=ema_decay is not None)
    rows = planned_rows(batch, mesh, accumulation=accumulation)
    parts: dict[str, Any] = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "average": state.average,
        "carried": state.carried,
        "batch": rows,
    }
    held: dict[str, Any] = {name: held_bytes(tree) for name, tree in parts.items()}
    if limit is not None and sum(held.values()) > limit:
        return Footprint(**held, peak=None, limit=limit)
    step = make_train_step(loss_fn, tx, state=state, accumulation=accumulation, schedule=schedule, ema_decay=ema_decay)
    try:
        with on(mesh):
            compiled = step.lower(state, rows).compile()  # type: ignore[attr-defined]
    except jax.errors.JaxRuntimeError as error:
        found = exhausted(error)
        if found is None:
            raise
        return Footprint(**held, peak=found.asked, limit=found.there or limit)
    return Footprint(**held, peak=_peak(compiled, mesh), collectives=collectives(compiled.as_text()))


def held_bytes(tree: Tree) -> int:
    """Return how many bytes of `tree`, whose leaves have a sharding, lie on each device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _peak(compiled: Any, mesh: Mesh) -> int:
    sizes = compiled.memory_analysis()
    if mesh.devices.flat[0].platform == "tpu":
        return sizes.peak_memory_in_bytes
    # Elsewhere the peak leaves out what is temporary.
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + outputs
