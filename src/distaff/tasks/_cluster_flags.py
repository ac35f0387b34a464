"""Flags of a process, not of a run: which of several processes it is. They are in no `recipe.yaml`."""

from dataclasses import dataclass, fields

from distaff.core.distributed import start
from distaff.core.errors import UsageError
from distaff.tasks._flags import check_positive, flag


@dataclass(kw_only=True)
class ClusterFlags:
    """How the processes of a run find each other."""

    distributed: str = flag("auto", "auto: as one of several processes where jax finds a cluster; off: alone.")
    coordinator_address: str | None = flag(None, "host:port of process 0, where jax finds no cluster.")
    num_processes: int | None = flag(None, "How many processes the run has.")
    process_id: int | None = flag(None, "Which of them this is, from 0 on.")
    heartbeat_timeout: int = flag(100, "Seconds without a sign of life after which a process is lost, and all end.")
    initialization_timeout: int = flag(300, "Seconds in which all processes must have met.")

    def check(self) -> None:
        """Raise `UsageError` for values that cannot be, and for flags that contradict each other."""
        names = ("coordinator_address", "num_processes", "process_id")
        given = [name for name in names if getattr(self, name) is not None]
        if self.distributed not in ("auto", "off"):
            raise UsageError(f"--distributed is auto or off, not '{self.distributed}'.")
        if given and self.distributed == "off":
            raise UsageError(f"--{given[0]} is for several processes, and --distributed is off: leave one out.")
        if given and len(given) < len(names):
            lacking = " and ".join(f"--{name}" for name in names if name not in given)
            raise UsageError(f"--{given[0]} says where one process is, not where all are: give {lacking} too.")
        check_positive(self, "num_processes heartbeat_timeout initialization_timeout")
        if self.num_processes is not None and not 0 <= (self.process_id or 0) < self.num_processes:
            raise UsageError(
                f"--process_id is {self.process_id}: the {self.num_processes} processes are 0 to "
                f"{self.num_processes - 1}."
            )
        host, _, port = (self.coordinator_address or "host:1").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise UsageError(
                f"--coordinator_address '{self.coordinator_address}' is no host:port: name process 0's host and a port "
                "that is free there, such as 10.0.0.1:8476."
            )

    def join(self) -> None:
        """Join the other processes, if there are any."""
        self.check()
        if self.distributed == "off":
            return
        start(
            coordinator_address=self.coordinator_address,
            num_processes=self.num_processes,
            process_id=self.process_id,
            heartbeat_timeout=self.heartbeat_timeout,
            initialization_timeout=self.initialization_timeout,
        )


# Of a training as a process, and nothing that its step is a function of.
CLUSTER_ONLY = frozenset(each.name for each in fields(ClusterFlags))
