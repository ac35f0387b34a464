"""Batches made and placed ahead of the step by a thread.

Batches come from a function `batches(step) -> {name: host array}`. A source whose batches depend on what was read
before (a stream) also has `state_dict() -> dict` (JSON-able: where the next batch starts) and `load_state_dict(dict)`.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from distaff.core.errors import DataError

Batches = Callable[[int], Any]


@runtime_checkable
class Positioned(Protocol):
    """A source of batches that can say where it stands and go back there."""

    def state_dict(self) -> dict[str, Any]:
        """Return, JSON-able, where the next batch starts."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to where `state_dict` was taken."""


@runtime_checkable
class Identified(Protocol):
    """A source of batches that can say what they are a function of besides the step."""

    def identity(self) -> dict[str, Any]:
        """Return, JSON-able, each setting that decides what the batches hold."""


@dataclass(frozen=True)
class Drawn:
    """One batch on its way to the step.

    step: which optimizer step it is for, counted from zero. batch: what `place` made of it.
    size: what `measure` said of the host batch. position: the source's state right after this batch; None without one.
    """

    step: int
    batch: Any
    size: Any
    position: dict[str, Any] | None


def position_of(batches: Batches) -> dict[str, Any] | None:
    """Return the state of a positioned source, None for a function of the step; DataError if JSON cannot hold it."""
    if not isinstance(batches, Positioned):
        return None
    try:
        # Through JSON and back: what is saved must not change when the source moves on.
        return json.loads(json.dumps(batches.state_dict()))
    except TypeError as error:
        raise DataError(f"The position of the batches cannot be saved as JSON: {error}.") from error


class Prefetch:
    """Iterates over the batches of steps `start` to `stop - 1`, up to `depth` of them made ahead.

    Each batch travels with the position after it, so what was made ahead never shows in a saved position. An error in
    the thread is raised where its batch would have come. Use it in a `with` block.

    place: host batch -> device batch. measure: host batch -> anything, for the log.
    error: what the source raised, once that reached the loop.
    waiting: called ten times a second while no batch is ready; True ends the iteration.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        start: int,
        stop: int,
        place: Callable[[Any], Any],
        measure: Callable[[Any], Any] = lambda batch: None,
        waiting: Callable[[], bool] = lambda: False,
        depth: int = 2,
    ):
        self._batches, self._place, self._measure, self._waiting = batches, place, measure, waiting
        self._steps = range(start, stop)
        # The thread holds one more batch than the queue while it waits for room.
        self.error: BaseException | None = None
        self._ready: queue.Queue[Drawn | BaseException | None] = queue.Queue(maxsize=max(depth - 1, 1))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="distaff-prefetch", daemon=True)

    def __enter__(self) -> "Prefetch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        # A source that hangs must not keep an interrupted run from leaving; the thread is a daemon.
        try:
            self._thread.join(timeout=5.0)
        except KeyboardInterrupt:
            # One that Python ends in the middle of placing a batch would take the process with it.
            self._thread.join(timeout=1.0)
            raise

    def __iter__(self) -> Iterator[Drawn]:
        while True:
            try:
                item = self._ready.get(timeout=0.1)
            except queue.Empty:
                if self._waiting():
                    return
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                self.error = item
                raise item
            yield item

    def _work(self) -> None:
        try:
            for step in self._steps:
                if self._closed.is_set():
                    return
                batch = self._batches(step)
                position = position_of(self._batches)
                if not self._put(Drawn(step, self._place(batch), self._measure(batch), position)):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Drawn | BaseException | None) -> bool:
        """Hand over `item`; False if nobody takes it any more."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
