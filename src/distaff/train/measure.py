"""Time, memory and compilations of a run."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import jax
import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Stopwatch:
    """Seconds of training, without what happens in `paused` blocks."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, time.perf_counter()

    def restart(self) -> float:
        """Return the seconds since the last restart and begin at zero."""
        now = time.perf_counter()
        seconds, self._seconds, self._since = self._seconds + now - self._since, 0.0, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out."""
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


class Compilations:
    """Counts how often jitted functions of given names are compiled, inside a `with` block."""

    def __init__(self, *names: str):
        self.counts = dict.fromkeys(names, 0)

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        name = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if event == _COMPILED and name in self.counts:
            self.counts[name] += 1


def peak_memory_mb() -> float:
    """Return the most memory used so far in MB: of the fullest local device, or on CPU of this process."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    peaks = [entry["peak_bytes_in_use"] for entry in statistics if entry and "peak_bytes_in_use" in entry]
    if peaks:
        return max(peaks) / 1e6
    # Linux counts in kilobytes, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
