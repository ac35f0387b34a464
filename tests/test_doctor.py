"""`distaff doctor`: each problem that it knows, on a machine that is made up."""

import os

import pytest

from distaff.cli import main
from distaff.core.distributed import Cluster
from distaff.core.errors import UsageError
from distaff.tasks import _probes as probes
from distaff.tasks._probes import GIB, NOTE, OK, PROBLEM, Devices, Machine
from recipe_cases import one_line

SMI = "| NVIDIA-SMI {0}    Driver Version: {0}    CUDA Version: 12.4 |"
NVRM = "NVRM version: NVIDIA UNIX {}x86_64 Kernel Module{}  {}  Wed Oct 25 2026\nGCC version: 12\n"
INSTALLED = dict.fromkeys([*probes.PACKAGES, *probes.FOR_TRAINING], "1.0")


def machine(root, files=(), *, packages=(), output=None, environ=(), **others):
    """A machine of the files `{path: text}`, with packages in their versions, on which all is well otherwise."""
    for path, text in dict(files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    settings = {
        "root": root,
        "environ": {"HF_HOME": str(root / "hf"), **dict(environ)},
        "output": lambda command: output if command == ["nvidia-smi"] else None,
        "version": {**INSTALLED, **dict(packages)}.get,
        "devices": lambda: Devices("cpu", ["cpu"]),
        "cluster": lambda: None,
        "free": lambda folder: 100 * GIB,
        "size": lambda folder: 10 * GIB,
        "threads": lambda: 8,
    }
    return Machine(**{**settings, **others})


def found(probe, *args, **options):
    (finding,) = probe(*args, **options)
    assert finding.text.endswith(".")
    return finding.level, finding.text


def test_a_machine_on_which_all_is_well(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 1 kB\nMemAvailable:   9000000 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "dev/shm/x": "",
        "hf/token": "hf_secret",
    }
    findings = probes.examine(machine(tmp_path, files))
    assert {finding.level for finding in findings} == {OK}
    assert len(findings) == 9
    assert "hf_secret" not in str(findings)


GPU = {"sys/bus/pci/devices/0/vendor": "0x10de\n"}
TPU = {"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "dev/accel0": ""}
CUDA12, CUDA13 = {"jax-cuda12-plugin": "1.0"}, {"jax-cuda13-plugin": "1.0"}


@pytest.mark.parametrize(
    ("output", "files", "packages", "level", "said"),
    [
        (SMI.format("580.65.06"), {}, CUDA13, OK, "driver 580.65.06, new enough for jax's CUDA 13 plugin"),
        (SMI.format("560.35"), {}, CUDA12, OK, "CUDA 12"),
        (
            SMI.format("560.35"),
            {},
            CUDA13,
            PROBLEM,
            "needs 580 or newer: update the driver, or pip install 'jax[cuda12]'",
        ),
        (SMI.format("470.82"), {}, CUDA12, PROBLEM, "CUDA 12 plugin needs 525 or newer: update the driver."),
        (SMI.format("470.82"), {}, {}, PROBLEM, "jax needs 525 or newer"),
        (SMI.format("590.1"), {}, {}, PROBLEM, "jax cannot use it: pip install 'jax[cuda13]'"),
        (SMI.format("545.23"), {}, {}, PROBLEM, "jax cannot use it: pip install 'jax[cuda12]'"),
        (None, {"proc/driver/nvidia/version": NVRM.format("", "", "535.129.03")}, {}, PROBLEM, "driver 535.129.03"),
        (
            None,
            {"proc/driver/nvidia/version": NVRM.format("Open ", " for x86_64", "580.1")},
            CUDA13,
            OK,
            "driver 580.1,",
        ),
        (None, GPU, CUDA13, PROBLEM, "no driver"),
    ],
)
def test_gpu(output, files, packages, level, said, tmp_path):
    here = machine(tmp_path, files, packages=packages, output=output)
    assert found(probes.gpu, here)[0] == level
    assert said in found(probes.gpu, here)[1]


def test_no_accelerator_says_nothing(tmp_path):
    here = machine(tmp_path, {"dev/vfio/0": "", "sys/bus/pci/devices/0/vendor": "0x8086\n"})
    assert [probes.gpu(here), probes.tpu_holders(here), probes.tpu_library(here)] == [[], [], []]


def test_tpu_without_library(tmp_path):
    assert "pip install 'jax[tpu]'" in found(probes.tpu_library, machine(tmp_path, TPU))[1]
    assert probes.tpu_library(machine(tmp_path, TPU, packages={"libtpu": "0.0.42"})) == []


@pytest.mark.parametrize("device", ["dev/accel0", "dev/vfio/1"])
def test_tpu_that_is_held(device, tmp_path):
    here = machine(tmp_path, {**TPU, device: "", "proc/41/cmdline": "python\0train.py\0"})
    assert found(probes.tpu_holders, here)[0] == OK
    for process, target in ((41, f"/{device}"), (os.getpid(), f"/{device}"), (7, "/dev/null")):
        (tmp_path / "proc" / str(process) / "fd").mkdir(parents=True)
        (tmp_path / "proc" / str(process) / "fd" / "9").symlink_to(target)
    level, text = found(probes.tpu_holders, here)
    assert level == PROBLEM
    assert "held by process 41 (python train.py): end it" in text
    (tmp_path / "proc" / "41" / "fd" / "9").unlink()
    assert found(probes.tpu_holders, here)[0] == OK
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "libtpu_lockfile").touch()
    assert "sudo rm /tmp/libtpu_lockfile" in found(probes.tpu_holders, here)[1]


def test_an_accelerator_that_was_asked_for(tmp_path):
    cpu = machine(tmp_path)
    assert found(probes.accelerator, cpu) == (OK, "jax computes on cpu: 1 x cpu.")
    assert "tpu was asked for and is not found" in found(probes.accelerator, cpu, asked="tpu")[1]
    for name in ("cuda", "gpu", "cuda,cpu"):
        asked = machine(tmp_path, environ={"JAX_PLATFORMS": name})
        assert found(probes.accelerator, asked)[0] == PROBLEM
    gpu = machine(tmp_path, devices=lambda: Devices("gpu", ["A", "A"]), environ={"JAX_PLATFORMS": "cuda"})
    assert found(probes.accelerator, gpu) == (OK, "jax computes on gpu: 2 x A.")
    assert found(probes.accelerator, gpu, asked="cpu")[0] == PROBLEM
    unused = machine(tmp_path, GPU)
    assert "is not used" in found(probes.accelerator, unused)[1]
    assert found(probes.accelerator, unused, asked="cpu")[0] == OK

    def fails():
        raise RuntimeError("Unable to initialize backend 'tpu':\nin use.")

    level, text = found(probes.accelerator, machine(tmp_path, devices=fails))
    assert level == PROBLEM
    assert "Unable to initialize backend 'tpu': in use): see the other lines" in text
    asked = found(probes.accelerator, machine(tmp_path, devices=fails, environ={"JAX_PLATFORMS": "tpu"}))[1]
    assert "in use): tpu was asked for, it needs 'jax[tpu]', on a TPU VM; see the other lines" in asked


def test_versions(tmp_path):
    assert [finding.level for finding in probes.versions(machine(tmp_path))] == [OK]
    rebuilt = machine(tmp_path, packages={"jax": "0.12.0", "jaxlib": "0.12.0.1"})
    assert [finding.level for finding in probes.versions(rebuilt)] == [OK]
    for wrong, said in (
        ({"jaxlib": "0.9"}, "jaxlib 0.9 is not of jax 1.0: pip install 'jaxlib==1.0'"),
        ({"jax-cuda12-plugin": "0.9"}, "pip install 'jax-cuda12-plugin==1.0'"),
        ({"flax": None}, "Not installed: flax"),
        ({"grain": None}, "pip install 'distaff[train]'"),
    ):
        _, finding = probes.versions(machine(tmp_path, packages=wrong))
        assert finding.level == (NOTE if "grain" in wrong else PROBLEM)
        assert said in finding.text


@pytest.mark.parametrize(("kilobytes", "level"), [(500_000, PROBLEM), (3_000_000, NOTE), (8_000_000, OK)])
def test_memory(kilobytes, level, tmp_path):
    assert found(probes.memory, machine(tmp_path, {"proc/meminfo": f"MemAvailable: {kilobytes} kB\n"}))[0] == level


def test_room(tmp_path, monkeypatch):
    for free, level in ((GIB // 2, PROBLEM), (5 * GIB, NOTE), (50 * GIB, OK)):
        assert found(probes.cache, machine(tmp_path, free=lambda folder, free=free: free))[0] == level
    small = machine(tmp_path, {"dev/shm/x": ""}, size=lambda folder: 64 << 20)
    assert found(probes.shared_memory, small) == (
        NOTE,
        "/dev/shm has 0.06 GiB, little for several GPUs or workers: docker run --shm-size=8g.",
    )
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written: set HF_HOME" in found(probes.cache, machine(tmp_path))[1]


def test_hub(tmp_path):
    assert found(probes.hub, machine(tmp_path))[0] == NOTE
    assert found(probes.hub, machine(tmp_path, environ={"HF_TOKEN": "hf_x"})) == (OK, "A token of the Hub is there.")
    offline = machine(tmp_path, environ={"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE is set" in found(probes.hub, offline)[1]


def test_huge_pages_and_threads(tmp_path):
    off = machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, threads=lambda: 1)
    assert found(probes.huge_pages, off)[0] == NOTE
    assert found(probes.threads, off)[0] == NOTE


def test_cluster(tmp_path):
    def fails():
        raise UsageError("It cannot be counted: do something.")

    pod = machine(tmp_path, cluster=lambda: Cluster("gcetpu", 4, 3))
    assert "gcetpu, process 3 of 4" in found(probes.cluster, pod)[1]
    assert found(probes.cluster, machine(tmp_path, cluster=fails)) == (PROBLEM, "It cannot be counted: do something.")
    batch = machine(tmp_path, environ={"SLURM_JOB_ID": "7"})
    assert "start with srun" in found(probes.cluster, batch)[1]


def test_the_command_ends_with_one_where_there_is_a_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("distaff.tasks.doctor.Machine", lambda: machine(tmp_path))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("No problem found.\n")
    assert main(["doctor", "--platform", "tpu"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  jax computes on cpu" in out
    assert out.endswith("1 problem(s) found.\n")
    assert main(["doctor", "--platform", "gpus"]) == 2
    assert "choose from cpu, gpu, tpu" in one_line(capsys)
