"""What a training step carries from one step to the next."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, Sharding

from distaff.core.mesh import replicated
from distaff.core.tree import Tree, map_with_path
from distaff.train.average import start_average


@struct.dataclass
class TrainState:
    """The whole state of a run on the devices.

    step: how many optimizer steps have been done, int32 scalar.
    params: the trained pytree.
    opt_state: what the optax optimizer keeps.
    rng: the key of the run; it never changes, a step draws from `fold_in(rng, step)`.
    carried: what the loss function hands on from one micro-batch to the next, such as running statistics: not trained,
    not decayed, saved and restored. None where it hands on nothing.
    average: the exponential moving average of `params` (see `average.py`), None where the run keeps none.
    """

    step: jax.Array
    params: Tree
    opt_state: Any
    rng: jax.Array
    carried: Tree = None
    average: Tree = None

    @property
    def evaluated(self) -> Tree:
        """The parameters to evaluate and to save: the average, in their dtypes, where there is one."""
        if self.average is None:
            return self.params
        return jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), self.average, self.params)


def create_state(
    params: Tree,
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh,
    seed: int = 0,
    shardings: Tree | None = None,
    carried: Tree = None,
    averaged: bool = False,
) -> TrainState:
    """Return the state before the first step, with copies of `params` (so a donated step leaves the caller's alone).

    `shardings` has the structure of `params`; without it parameters that lie on `mesh` stay as they lie, and every
    device holds all others, as each holds all that is `carried`. With `averaged` the state has an average too, which
    lies as the parameters do.
    """
    whole = replicated(mesh)
    if shardings is None:
        shardings = jax.tree.map(lambda leaf: _own_sharding(leaf, mesh) or whole, params)

    def copied(tree: Tree, shardings: Tree) -> Tree:
        # device_put may share the caller's buffers, and jit hands unchanged arguments through: only a copy is ours.
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)
        return copy(jax.device_put(tree, shardings))

    params = copied(params, shardings)
    like_params = opt_state_shardings(jax.eval_shape(tx.init, params), params, shardings, mesh)
    return TrainState(
        step=jax.device_put(np.zeros((), np.int32), whole),
        params=params,
        opt_state=jax.jit(tx.init, out_shardings=like_params)(params),
        # Made where it stays: a seed handed in from outside would be an implicit transfer.
        rng=jax.jit(lambda: jax.random.key(seed), out_shardings=whole)(),
        carried=None if carried is None else copied(carried, jax.tree.map(lambda _: whole, carried)),
        average=jax.jit(start_average, out_shardings=shardings)(params) if averaged else None,
    )


def planned_state(
    params: Tree,
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh,
    shardings: Tree,
    carried: Tree = None,
    averaged: bool = False,
) -> TrainState:
    """Return the shapes, dtypes and shardings of what `create_state` makes of parameters of the shapes `params`.

    Nothing is allocated, and the devices of `mesh` need not be there.
    """
    whole = replicated(mesh)
    opt_state = jax.eval_shape(tx.init, params)
    average = jax.eval_shape(start_average, params) if averaged else None
    arrays: dict[str, Any] = {
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        "rng": _with_sharding(jax.eval_shape(partial(jax.random.key, 0)), whole),
        "carried": None if carried is None else jax.tree.map(lambda leaf: _with_sharding(leaf, whole), carried),
        "average": None if average is None else jax.tree.map(_with_sharding, average, shardings),
    }
    return TrainState(
        params=jax.tree.map(_with_sharding, params, shardings),
        opt_state=jax.tree.map(_with_sharding, opt_state, opt_state_shardings(opt_state, params, shardings, mesh)),
        **arrays,
    )


def shardings_of(state: TrainState) -> TrainState:
    """Return where each array of `state` lies, to pin the outputs of a step there."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def abstract_state(state: TrainState) -> TrainState:
    """Return shapes, dtypes and shardings of `state`, the target of a restore."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def opt_state_shardings(opt_state: Tree, params: Tree, shardings: Tree, mesh: Mesh) -> Tree:
    """Give a leaf of the optimizer the sharding of the parameter whose path is in its own, if it has its shape."""
    default = replicated(mesh)
    by_path: dict[str, tuple[tuple[int, ...], Sharding]] = {}

    def note(path: str, leaf: Any) -> None:
        by_path[path] = (leaf.shape, leaf.sharding)

    map_with_path(note, jax.tree.map(_with_sharding, params, shardings))

    def choose(path: str, leaf: Any) -> Sharding:
        parts = path.split("/")
        for start in range(len(parts)):
            # SM3 keeps a list under a parameter's path.
            for end in (len(parts), len(parts) - 1):
                shape, sharding = by_path.get("/".join(parts[start:end]), (None, default))
                # Adafactor's factored moments stand under a parameter's path and are smaller.
                if shape == leaf.shape:
                    return sharding
        return default

    return map_with_path(choose, opt_state)


def _own_sharding(leaf: Any, mesh: Mesh) -> Sharding | None:
    """Return where an array lies, if that is on `mesh`."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh == mesh else None


def _with_sharding(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
