"""SIGTERM and Ctrl-C as a wish to stop: the step in hand is finished and saved first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Whether someone asked the run to stop. number: the signal's, None while nobody did."""

    number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGTERM and the first Ctrl-C inside the block; the second Ctrl-C aborts as it always did.

    Outside the main thread, where Python allows no handlers, nothing is caught.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request:
            raise KeyboardInterrupt
        request.number = number

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
