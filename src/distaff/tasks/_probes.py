"""What `distaff doctor` looks at: each probe is a function of a `Machine`, which tests put together from fakes."""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distaff.core.distributed import Cluster, find_cluster
from distaff.core.errors import DistaffError, UsageError

OK, NOTE, PROBLEM = "OK", "NOTE", "PROBLEM"
GIB = 1 << 30
# The oldest driver that the wheels of jax run with, by the CUDA of the plugin (jax's page on installation).
OLDEST_DRIVER = {"12": 525, "13": 580}
PACKAGES = "distaff jax jaxlib flax optax orbax-checkpoint transformers tokenizers numpy".split()
# What training needs besides: the extra `train`.
FOR_TRAINING = "datasets grain scikit-learn tensorboardX".split()
# PCI's number of the makers of accelerators.
_NVIDIA, _GOOGLE = "0x10de", "0x1ae0"


@dataclass(frozen=True)
class Finding:
    """One line of the report: how bad it is, and what it is with what to do about it."""

    level: str
    text: str


@dataclass(frozen=True)
class Devices:
    """What jax computes on: its backend and the kind of each device of this process."""

    backend: str
    kinds: list[str]


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Devices:
    """Ask jax in a process of its own: a driver that hangs or aborts must not take the other findings with it."""
    ask = "import json, jax; print(json.dumps([jax.default_backend(), [x.device_kind for x in jax.local_devices()]]))"
    try:
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        raise DistaffError("no answer in 120 s; all hosts of a TPU slice must ask at once") from error
    if done.returncode:
        raise DistaffError((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
    return Devices(*json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True)
class Machine:
    """Where probes look.

    root: of the file system. output: of a command, None where it cannot be run. version: of a package, None where it is
    not installed. devices: as jax finds them, or its error. free: bytes on the disk of a folder.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    output: Callable[[list[str]], str | None] = _output
    version: Callable[[str], str | None] = _version
    devices: Callable[[], Devices] = _devices
    cluster: Callable[[], Cluster | None] = find_cluster
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    size: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).total
    threads: Callable[[], int] = lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def read(self, path: str) -> str | None:
        """Return the text of a file below the root, None where there is none that can be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return None

    def makers(self) -> set[str]:
        """Return the numbers of the makers of this machine's PCI devices."""
        return {path.read_text().strip() for path in self.root.glob("sys/bus/pci/devices/*/vendor")}


# Software.


def versions(machine: Machine) -> list[Finding]:
    """Versions, and packages that do not go together."""
    found = {name: machine.version(name) for name in (*PACKAGES, *FOR_TRAINING)}
    lost = [name for name in PACKAGES if found[name] is None]
    named = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
    findings = [Finding(OK, f"Python {platform.python_version()}, {named}.")]
    if lost:
        findings.append(Finding(PROBLEM, f"Not installed: {', '.join(lost)}. Install distaff again with pip."))
    if any(found[name] is None for name in FOR_TRAINING):
        findings.append(Finding(NOTE, "What training needs is not all installed: pip install 'distaff[train]'."))
    for name in ("jaxlib", *(f"jax-cuda{cuda}-plugin" for cuda in OLDEST_DRIVER)):
        number = machine.version(name)
        if number is not None and found["jax"] is not None and _release(number) != _release(found["jax"]):
            text = f"{name} {number} is not of jax {found['jax']}: pip install '{name}=={found['jax']}'."
            findings.append(Finding(PROBLEM, text))
    return findings


def _release(number: str) -> tuple[str, ...]:
    """Return the first three numbers: a fourth, of a package that was built again, changes nothing."""
    return tuple(number.split("+")[0].split(".")[:3])


# Accelerators.


def tpu_holders(machine: Machine) -> list[Finding]:
    """Who holds the TPU, which one process can have at a time."""
    chips = [*machine.root.glob("dev/accel[0-9]*"), *machine.root.glob("dev/vfio/[0-9]*")]
    if not chips or _GOOGLE not in machine.makers():
        return []
    holders = []
    for process in sorted(machine.root.glob("proc/[0-9]*"), key=lambda path: int(path.name)):
        links = []
        with contextlib.suppress(OSError):  # of another user, or just ended
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        if int(process.name) != os.getpid() and any(re.search(r"/dev/(accel|vfio/)\d", link) for link in links):
            command = (machine.read(f"proc/{process.name}/cmdline") or "").replace("\0", " ").strip()
            holders.append(f"{process.name} ({command[:60] or 'unknown'})")
    if holders:
        text = f"The TPU is held by process {', '.join(holders)}: end it with 'kill PID', or wait for its end."
        return [Finding(PROBLEM, text)]
    if (machine.root / "tmp" / "libtpu_lockfile").exists():
        text = (
            "/tmp/libtpu_lockfile is there, and no process of yours holds the TPU: 'sudo rm /tmp/libtpu_lockfile' if "
        )
        return [Finding(PROBLEM, f"{text}no other user's does ('sudo lsof /dev/accel* /dev/vfio/*').")]
    return [Finding(OK, f"{len(chips)} TPU chip(s), held by nobody.")]


def tpu_library(machine: Machine) -> list[Finding]:
    """A TPU without the library that drives it."""
    if _GOOGLE in machine.makers() and machine.version("libtpu") is None:
        return [Finding(PROBLEM, "This machine has a TPU, and libtpu is not installed: pip install 'jax[tpu]'.")]
    return []


def driver_of(machine: Machine) -> tuple[str | None, bool]:
    """Return the version of the NVIDIA driver, and whether there is a GPU of theirs at all."""
    told = machine.output(["nvidia-smi"]) or ""
    found = re.search(r"Driver Version:\s*([\d.]+)", told)
    found = found or re.search(r"Module(?: for \S+)?\s+([\d.]+)", machine.read("proc/driver/nvidia/version") or "")
    return (found[1] if found else None), bool(found) or _NVIDIA in machine.makers()


def gpu(machine: Machine) -> list[Finding]:
    """A GPU without driver or plugin, or with a driver that is too old for the plugin."""
    driver, there = driver_of(machine)
    if not there:
        return []
    if driver is None:
        return [Finding(PROBLEM, "This machine has an NVIDIA GPU, and no driver for it: install one, of 580 or newer.")]
    major = int(driver.split(".")[0])
    plugin = next((cuda for cuda in reversed(OLDEST_DRIVER) if machine.version(f"jax-cuda{cuda}-plugin")), None)
    fitting = [cuda for cuda, oldest in OLDEST_DRIVER.items() if major >= oldest]
    if plugin is None and fitting:
        text = f"There is an NVIDIA GPU (driver {driver}), and jax cannot use it: pip install 'jax[cuda{fitting[-1]}]'."
        return [Finding(PROBLEM, text)]
    if plugin is None or plugin not in fitting:
        oldest = OLDEST_DRIVER[plugin or next(iter(OLDEST_DRIVER))]
        other = f", or pip install 'jax[cuda{fitting[-1]}]'" if fitting else ""
        wanted = f"jax's CUDA {plugin} plugin needs" if plugin else "jax needs"
        text = f"The NVIDIA driver is {driver}, and {wanted} {oldest} or newer: update the driver{other}."
        return [Finding(PROBLEM, text)]
    return [Finding(OK, f"NVIDIA driver {driver}, new enough for jax's CUDA {plugin} plugin.")]


def accelerator(machine: Machine, *, asked: str | None = None) -> list[Finding]:
    """What jax computes on, against what was asked for by `asked` or JAX_PLATFORMS."""
    wanted = asked or machine.environ.get("JAX_PLATFORMS", "").split(",")[0] or None
    wanted = {"cuda": "gpu", "rocm": "gpu"}.get(wanted or "", wanted)
    known = {"gpu": "its driver and 'jax[cuda13]'", "tpu": "'jax[tpu]', on a TPU VM"}
    needs = f"it needs {known.get(wanted or '', f'JAX_PLATFORMS={wanted}')}"
    try:
        devices = machine.devices()
    except Exception as error:  # each backend raises its own
        reason = " ".join(str(error).split())[:300].rstrip(".")
        advice = f"{wanted} was asked for, {needs}; " if wanted in known else ""
        text = f"jax finds no devices ({reason}): {advice}see the other lines, or unset JAX_PLATFORMS."
        return [Finding(PROBLEM, text)]
    kinds = ", ".join(f"{devices.kinds.count(kind)} x {kind}" for kind in dict.fromkeys(devices.kinds))
    said = f"jax computes on {devices.backend}: {kinds}."
    if wanted is not None and wanted != devices.backend:
        return [Finding(PROBLEM, f"{said} {wanted} was asked for and is not found: {needs}.")]
    unused = driver_of(machine)[1] or _GOOGLE in machine.makers()
    if wanted is None and devices.backend == "cpu" and unused:
        return [Finding(PROBLEM, f"{said} The accelerator of this machine is not used: see the other lines.")]
    return [Finding(OK, said)]


# Room.


def shared_memory(machine: Machine) -> list[Finding]:
    """Room in /dev/shm, through which processes and GPUs of one machine talk."""
    folder = machine.root / "dev" / "shm"
    if not folder.is_dir():
        return []
    size = machine.size(folder)
    if size < GIB:
        text = f"/dev/shm has {size / GIB:.2f} GiB, little for several GPUs or workers: docker run --shm-size=8g."
        return [Finding(NOTE, text)]
    return [Finding(OK, f"/dev/shm has {size / GIB:.1f} GiB.")]


def memory(machine: Machine) -> list[Finding]:
    """Memory that is free."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", machine.read("proc/meminfo") or "")
    if not found:
        return []
    free = int(found[1]) * 1024 / GIB
    level = PROBLEM if free < 1 else NOTE if free < 4 else OK
    advice = "" if level == OK else " End other programs: a model of 100 million parameters takes 2 GiB to train."
    return [Finding(level, f"{free:.1f} GiB of memory are free.{advice}")]


def cache(machine: Machine) -> list[Finding]:
    """The folder of models and data: whether it can be written and has room."""
    home = Path(machine.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    there = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK):
        return [Finding(PROBLEM, f"'{home}' cannot be written: set HF_HOME to a folder that can.")]
    free = machine.free(there) / GIB
    level = PROBLEM if free < 1 else NOTE if free < 10 else OK
    advice = "" if level == OK else " Make room ('hf cache ls' shows what is there), or set HF_HOME to another disk."
    return [Finding(level, f"{free:.1f} GiB are free for models and data in '{home}'.{advice}")]


# The rest.


def hub(machine: Machine) -> list[Finding]:
    """Whether the Hub is used, and by whom; a token is never shown."""
    home = Path(machine.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(machine.environ.get("HF_TOKEN_PATH") or home / "token")
    if machine.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Finding(NOTE, "HF_HUB_OFFLINE is set: nothing is downloaded or published; unset it for that.")]
    if machine.environ.get("HF_TOKEN") or kept.is_file():
        return [Finding(OK, "A token of the Hub is there.")]
    return [Finding(NOTE, "No token of the Hub: public models can be read; 'hf auth login' to publish.")]


def huge_pages(machine: Machine) -> list[Finding]:
    """Whether the system gives huge pages, which a fifth of a step on CPU depends on."""
    told = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    if told is None:
        return []
    if "[never]" in told:
        text = "Huge pages are off, and steps on CPU slower: echo madvise | sudo tee "
        return [Finding(NOTE, f"{text}/sys/kernel/mm/transparent_hugepage/enabled.")]
    return [Finding(OK, "Huge pages can be had.")]


def threads(machine: Machine) -> list[Finding]:
    """How many threads this process may have."""
    count = machine.threads()
    few = Finding(NOTE, "One thread for this process: batches are made while no step computes; ask for 2 or more.")
    return [few if count == 1 else Finding(OK, f"{count} threads for this process.")]


def cluster(machine: Machine) -> list[Finding]:
    """Whether this process is one of several."""
    try:
        found = machine.cluster()
    except UsageError as error:
        return [Finding(PROBLEM, str(error))]
    if found is not None and found.processes > 1:
        where = f"{found.name}, process {found.process} of {found.processes}"
        return [Finding(OK, f"A cluster: {where}; 'distaff train' joins the others.")]
    if "SLURM_JOB_ID" in machine.environ and found is None:
        return [Finding(NOTE, "A job of Slurm, but no step of it: start with srun, or the processes stay alone.")]
    return [Finding(OK, "No cluster: one process, or several by --coordinator_address.")]


PROBES: tuple[Callable[[Machine], list[Finding]], ...] = (
    *(versions, tpu_library, tpu_holders, gpu, shared_memory, memory, cache, hub, huge_pages, threads, cluster),
)


def examine(machine: Machine, *, asked: str | None = None) -> list[Finding]:
    """Return the findings of all probes; jax's devices last, because asking takes them for a moment."""
    every: list[Any] = [*(probe(machine) for probe in PROBES), accelerator(machine, asked=asked)]
    return [finding for findings in every for finding in findings]
