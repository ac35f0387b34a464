"""Evaluation: sums over all batches, divided once."""

from collections import deque

import jax
from jax.sharding import Mesh

from distaff.core.mesh import checked_mesh, make_mesh, on, on_devices
from distaff.core.tree import Tree
from distaff.train.metrics import Sums, divide
from distaff.train.prefetch import Batches, Prefetch
from distaff.train.step import LossFunction, eval_step, place_eval_rows


def evaluate(
    loss_fn: LossFunction,
    *,
    params: Tree,
    batches: Batches,
    steps: int,
    mesh: Mesh | None = None,
    carried: Tree = None,
) -> dict[str, float]:
    """Return each metric of `loss_fn` over `batches(0)` to `batches(steps - 1)`, whatever their size.

    `params`, and what is `carried` beside them, stay as they are; what does not lie on the devices of `mesh` is copied
    there, whole to each. A metric whose weights are all zero is left out.
    """
    mesh = make_mesh() if mesh is None else checked_mesh(mesh)
    params, carried = on_devices((params, carried), mesh)
    totals: dict[str, tuple[float, float]] = {}
    pending: deque[Sums] = deque()

    def collect() -> None:
        # On the host in double precision: float32 no longer counts beyond 2**24.
        for name, (total, weight) in jax.device_get(pending.popleft()).items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + float(total), before[1] + float(weight))

    with Prefetch(batches, start=0, stop=steps, place=lambda batch: place_eval_rows(batch, mesh)) as drawn:
        for item in drawn:
            with on(mesh):
                pending.append(eval_step(loss_fn, params, item.batch, carried))
            # One batch behind, so that the device has work while this waits.
            if len(pending) > 1:
                collect()
    while pending:
        collect()
    return divide(totals)
