"""Several processes as one run: who goes first, what all agree on, and arrays that no process holds whole.

What is agreed on goes through jax's coordination service and no device, so one process may wait hours for another. All
processes must call these functions in the same order, from their main threads.
"""

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from distaff.core.errors import DistaffError, UsageError

Answer = TypeVar("Answer")

# Whoever waits so long waits for a process that lives: the loss of one ends all of them sooner.
_FOREVER_MS = 7 * 24 * 3600 * 1000
_calls = itertools.count()


def is_first() -> bool:
    """Tell whether this process is the one that writes."""
    return jax.process_index() == 0


def wait_for_all() -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        _client().wait_at_barrier(f"distaff/{next(_calls)}", timeout_in_ms=_FOREVER_MS)


def agreed(decide: Callable[[], Answer]) -> Answer:
    """Return in every process what `decide` returned in the first, which alone calls it; likewise a `DistaffError`.

    What it returns must be JSON-able. Files of a shared folder are looked at this way: between the looks of two
    processes the faster one may have written there.
    """
    if jax.process_count() == 1:
        return decide()
    key = f"distaff/{next(_calls)}"
    if is_first():
        try:
            answer = decide()
        except DistaffError as error:
            told = {"error": str(error), "usage": isinstance(error, UsageError)}
            _client().key_value_set(key, json.dumps(told))
            raise
        _client().key_value_set(key, json.dumps({"answer": answer}))
        return answer
    told = json.loads(_client().blocking_key_value_get(key, _FOREVER_MS))
    if "error" in told:
        raise (UsageError if told["usage"] else DistaffError)(told["error"])
    return told["answer"]


def everywhere(holds: bool, *, within: float) -> bool | None:
    """Tell whether `holds` is true in every process; None where one has not said it after so many seconds."""
    if jax.process_count() == 1:
        return holds
    key = f"distaff/{next(_calls)}"
    _client().key_value_set(f"{key}/{jax.process_index()}", str(int(holds)))
    try:
        told = [
            _client().blocking_key_value_get(f"{key}/{index}", int(within * 1000))
            for index in range(jax.process_count())
        ]
    except jax.errors.JaxRuntimeError:
        return None
    return all(map(int, told))


class Appointment:
    """A step after which all processes of a run stop, because one of them was asked to.

    The process that was asked names a step that no other can have passed: each step needs all of them, so the fastest
    is at most two steps ahead (`Run` lets two be under way).
    """

    AHEAD = 4

    def __init__(self) -> None:
        self._key = f"distaff/{next(_calls)}"
        self._step: int | None = None

    def reached(self, step: int, *, asked: bool) -> bool:
        """Tell whether to stop after `step`; `asked`: this process was asked to. Call it after every step."""
        if self._step is None:
            if asked:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has named a step
                    _client().key_value_set(self._key, str(step + self.AHEAD))
            self._step = self._read()
        return self._step is not None and step >= self._step

    def _read(self) -> int | None:
        try:
            return int(_client().key_value_try_get(self._key))
        except jax.errors.JaxRuntimeError:
            return None  # nobody has named one


def on_host(leaf: Any) -> np.ndarray:
    """Return an array whole; every process must call this where none holds all of it."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(jax.device_get(leaf))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def gathered(flat: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """Return the arrays of `flat` whole in the first process, None in the others, which must call this too.

    They come one after the other: no other process, and no device, holds more than one of them whole.
    """
    whole: dict[str, np.ndarray] = {}
    for name, leaf in flat.items():
        array = on_host(leaf)
        if is_first():
            whole[name] = array
    return whole if is_first() else None


def _client() -> Any:
    # jax offers the service to its users through devices alone.
    from jax._src import distributed

    if distributed.global_state.client is None:
        raise UsageError("A run of several processes needs jax.distributed.initialize(): call it first.")
    return distributed.global_state.client
