"""What a model says of every row of a set, brought to the host in the order of the rows."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from distaff.core.mesh import checked_mesh, make_mesh, on, on_devices, replicated
from distaff.core.tree import Tree
from distaff.train.prefetch import Prefetch
from distaff.train.step import place_eval_rows

# Beside the outputs: which rows they are of, and zero for those that fill up.
_NUMBERS, _WEIGHTS = "row numbers", "row weights"
# `(params, batch) -> {name: [rows, ...]}`, or `(params, batch, carried)` where something is carried.
Forward = Callable[..., dict[str, jax.Array]]


class RowBatches(Protocol):
    """Batches that know which rows they hold."""

    rows: int
    steps_per_epoch: int

    def __call__(self, step: int) -> Any:
        """Return this process's rows of a batch."""

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the global batch's rows, and zero for those that only fill it up."""


def collect(
    forward: Forward,
    *,
    params: Tree,
    batches: RowBatches,
    mesh: Mesh | None = None,
    carried: Tree = None,
) -> dict[str, list[np.ndarray]]:
    """Return for each output of `forward` one array a row, in the order of the rows and without those that fill up.

    Arrays of rows from different batches may differ in length. `params` and `carried` are brought to `mesh` as in
    `evaluate`.
    """
    mesh = make_mesh() if mesh is None else checked_mesh(mesh)
    params, carried = on_devices((params, carried), mesh)
    found: dict[str, list[Any]] = {}
    pending: deque[dict[str, jax.Array]] = deque()

    def drawn_rows(step: int) -> tuple[Any, dict[str, np.ndarray]]:
        numbers, weights = batches.indices(step)
        part = len(numbers) // jax.process_count()
        here = slice(jax.process_index() * part, (jax.process_index() + 1) * part)
        # int32 is what devices have; the numbers travel with their rows, because a mesh may order processes otherwise.
        return batches(step), {_NUMBERS: numbers[here].astype(np.int32), _WEIGHTS: weights[here]}

    def take() -> None:
        outputs = jax.device_get(pending.popleft())
        numbers, weights = outputs.pop(_NUMBERS), outputs.pop(_WEIGHTS)
        for name, rows in outputs.items():
            places = found.setdefault(name, [None] * batches.rows)
            for number, weight, row in zip(numbers, weights, rows, strict=True):
                if weight:
                    places[number] = row

    def placed(batch: Any) -> Any:
        return place_eval_rows(batch, mesh)

    with Prefetch(drawn_rows, start=0, stop=batches.steps_per_epoch, place=placed) as drawn:
        for item in drawn:
            batch, numbered = item.batch
            with on(mesh):
                pending.append(_outputs(forward, mesh, params, batch, carried, numbered))
            # One batch behind, so that the device has work while this waits.
            if len(pending) > 1:
                take()
    while pending:
        take()
    return found


@partial(jax.jit, static_argnums=(0, 1))
def _outputs(
    forward: Forward, mesh: Mesh, params: Tree, batch: Any, carried: Tree, numbered: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return the outputs of a global batch, whole on every device, so that every process can read all of it."""
    outputs = forward(params, batch) if carried is None else forward(params, batch, carried)
    return jax.lax.with_sharding_constraint({**outputs, **numbered}, replicated(mesh))
