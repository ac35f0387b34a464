"""Starting jax in several processes, by addresses that are given or by the cluster that jax finds, and leaving them."""

import atexit
import logging
import os
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from distaff.core.errors import DistaffError, UsageError

logger = logging.getLogger("distaff")

# How jax ends a process when another one is lost, abort(), which no Python code can catch; and so do we where we can.
LOST = 134
# What a user must see last of a process that was aborted, and so could say nothing itself.
LAST_WORDS = (
    "This process was ended from outside or by jax, which ends all processes of a run when one is lost: start all with "
    "the same command again, with --resume_from_checkpoint to go on from the last checkpoint."
)
# Words of errors that a collective operation ends with when the process on its other side is gone.
_LOST = ("gloo", "nccl", "connection", "unavailable", "heartbeat", "coordination")


_witness: subprocess.Popen | None = None


@dataclass(frozen=True)
class Cluster:
    """A cluster that jax finds: the name of its kind, how many processes there are, and which this one is."""

    name: str
    processes: int
    process: int


def find_cluster() -> Cluster | None:
    """Return the cluster of this process, None where jax finds none. It looks at variables, and on a TPU VM asks."""
    # jax offers what it finds to `initialize` alone, which waits for processes that may never come.
    from jax._src import clusters

    with warnings.catch_warnings():
        # In every pod without the kubernetes package jax says so.
        warnings.simplefilter("ignore")
        for kind in clusters.ClusterEnv._cluster_types:
            if kind.opt_in_only_method:
                continue
            try:
                if kind.is_env_present():
                    return Cluster(kind.name, kind.get_process_count(), kind.get_process_id())
            except Exception as error:  # each kind raises its own
                reason = " ".join(str(error).split()).rstrip(".")
                raise UsageError(
                    f"This looks like a cluster ({kind.name}), and its processes cannot be counted ({reason}): give "
                    "--coordinator_address, --num_processes and --process_id, or --distributed off."
                ) from error
    return None


def start(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_timeout: int = 100,
    initialization_timeout: int = 300,
) -> None:
    """Join the other processes, before any device is used; without arguments those of the cluster that is found.

    A process alone starts nothing. One that cannot meet the others within `initialization_timeout` seconds ends here.
    """
    cluster = find_cluster() if coordinator_address is None else None
    if cluster is not None:
        num_processes, process_id = cluster.processes, cluster.process
    if num_processes is None or num_processes == 1:
        return
    import jax

    where = coordinator_address or f"the {cluster.name if cluster else ''} cluster's first process"
    waiting = (
        f"Not all of the {num_processes} processes met at {where} within {initialization_timeout} s (this is process "
        f"{process_id}): look at those that are missing, and start all with the same address within that time, or "
        "raise --initialization_timeout."
    )
    # It would catch SIGTERM for itself, and end nothing: `train.signals` does that.
    jax.config.update("jax_enable_preemption_service", False)
    with _within(initialization_timeout, waiting):
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat_timeout,
            # jax aborts at the end of its own time; the sentence comes first.
            initialization_timeout=initialization_timeout + 30,
        )
    _leave_a_witness()
    if jax.process_index() == 0:
        found = "" if cluster is None else f", found by {cluster.name}"
        logger.info(
            "Process 0 of %d%s: %d of %d devices are here. If a process is lost, the others end within %d s "
            "(exit code %d).",
            *(jax.process_count(), found, jax.local_device_count(), jax.device_count(), heartbeat_timeout, LOST),
        )
    else:
        # What the first process says need not be said by all.
        logger.setLevel(logging.WARNING)


def started() -> bool:
    """Tell whether this process is one of several."""
    # Without jax, or before it has met others, the answer costs nothing.
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized() and jax.process_count() > 1


@contextmanager
def leaving_together(*, debug: bool = False) -> Iterator[None]:
    """End the process at once where the block raises and others work with it; `debug` shows the traceback.

    Python's own way out waits for them at the door, and they wait for this process inside a step.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not started():
            raise
        if debug:
            traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            print("distaff: interrupted", file=sys.stderr)
            _leave(130)
        if isinstance(error, DistaffError):
            print(f"distaff: {error}", file=sys.stderr)
            _leave(error.exit_code)
        if any(word in str(error).lower() for word in _LOST):
            print(
                f"distaff: Another process of the run is lost, or the network to it ({_first_words(error)}): start all "
                "with the same command again, with --resume_from_checkpoint to go on from the last checkpoint.",
                file=sys.stderr,
            )
            _leave(LOST)
        traceback.print_exc()
        _leave(1)


def _leave_a_witness() -> None:
    """Start a shell that says the last words of this process where it ends without having said that all is well."""
    global _witness
    shell = "/bin/sh"
    if os.path.exists(shell):
        script = 'read word || echo "distaff: $1" >&2'
        # In a session of its own, so that Ctrl-C does not reach it.
        _witness = subprocess.Popen(
            [shell, "-c", script, "distaff", LAST_WORDS], stdin=subprocess.PIPE, start_new_session=True
        )
        atexit.register(_dismiss_witness)


def _dismiss_witness() -> None:
    if _witness is not None and _witness.returncode is None:
        _witness.communicate(b"well\n")


def _leave(code: int) -> None:
    _dismiss_witness()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _within(seconds: int, sentence: str) -> Iterator[None]:
    """End the process with `sentence` if the block takes longer: jax waits in C++, where no exception reaches."""

    def give_up() -> None:
        print(f"distaff: {sentence}", file=sys.stderr)
        _leave(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _first_words(error: BaseException) -> str:
    """Return what an error says before it goes into addresses and advice."""
    return re.split(r"\. |\[|\n", str(error).strip())[0].rstrip(".: ")
