"""Two real processes with two devices each: the same run as one process, lost, gone on with, and stopped together."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import quick_xla
from distaff.cli import main
from distaff.core.distributed import LAST_WORDS, LOST
from distaff.core.errors import UsageError
from distaff.core.mesh import _check_processes
from distaff.core.processes import agreed, gathered, wait_for_all
from distaff.train.checkpoint import complete_steps
from recipe_cases import logged, one_line, sentences

SHAPE = "n_embd=16,n_layer=1,n_head=2,n_positions=32"
HEARTBEAT = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n".join(sentences(120, 0)) + "\n")
    (folder / "validation.txt").write_text("\n".join(sentences(30, 1)) + "\n")
    flags = ("--train_file", str(folder / "train.txt"), "--vocab_size", "320")
    assert main(["tokenizer", "train", *flags, "--output_dir", str(folder / "tokenizer")]) == 0
    return folder


def words(corpus, output, *flags, rows):
    """The command of a run of 16 steps."""
    return [
        *("train", "clm", "--no_hugepages", "--output_dir", str(output), "--model_type", "gpt2"),
        *("--tokenizer_name", str(corpus / "tokenizer"), "--config_overrides", SHAPE, "--block_size", "16"),
        *("--train_file", str(corpus / "train.txt"), "--validation_file", str(corpus / "validation.txt")),
        *("--per_device_train_batch_size", str(rows), "--per_device_eval_batch_size", str(rows)),
        *("--max_steps", "16", "--logging_steps", "2", "--save_steps", "4", "--learning_rate", "1e-3"),
        *("--report_to", "none", "--resume_from_checkpoint", "if_any", *flags),
    ]


def start_both(corpus, output):
    """Start both processes of a run, each with two devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(corpus / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS") or quick_xla.flags(),
        "HF_HOME": str(corpus / "cache"),
    }
    started = []
    for index in (0, 1):
        place = ("--coordinator_address", address, "--num_processes", "2", "--process_id", str(index))
        # Each parameter is in four parts, two in each process.
        place = (*place, "--mesh", "fsdp=-1", "--heartbeat_timeout", str(HEARTBEAT))
        command = words(corpus, output, *place, rows=2)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "distaff.cli", *command],
                env={**os.environ, **settings},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def until_saved(output, step, started):
    """Wait until a checkpoint of `step` is complete."""
    deadline = time.monotonic() + 120
    while step not in complete_steps(output / "checkpoints"):
        assert all(process.poll() is None for process in started), [process.stderr.read() for process in started]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ends(started):
    """The exit codes of processes and what they said."""
    said = [process.communicate(timeout=120)[1] for process in started]
    return [process.returncode for process in started], said


def assert_close(one: Path, two: Path, tolerance: float):
    """Compare parameters and logs of two runs."""
    ours, theirs = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], rtol=0, atol=tolerance, err_msg=name)
    assert len(logged(one)) == len(logged(two))
    for here, there in zip(logged(one), logged(two)):
        # Where the loss is 6, a perplexity is a few hundred.
        assert here == pytest.approx(there, rel=tolerance, abs=1e-6 if tolerance else 0)


def test_a_run_of_two_processes_is_lost_and_gone_on_with(corpus, tmp_path):
    assert main(words(corpus, tmp_path / "one", rows=8)) == 0  # as many as four devices have
    codes, said = ends(start_both(corpus, tmp_path / "two"))
    assert codes == [0, 0], said
    assert "Process 0 of 2: 2 of 4 devices are here" in said[0]
    assert "step 16/16" in said[0]
    assert "step" not in said[1]  # what the first process says
    assert_close(tmp_path / "one", tmp_path / "two", 1e-5)

    parts = tmp_path / "parts"
    started = start_both(corpus, parts)
    until_saved(parts, 4, started)
    started[1].kill()
    lost = time.monotonic()
    codes, said = ends(started)
    # jax allows a heartbeat's interval more than the timeout.
    assert time.monotonic() - lost < 2 * HEARTBEAT + 10
    assert codes[0] in (LOST, -signal.SIGABRT), said
    assert LAST_WORDS in said[0] or "Another process of the run is lost" in said[0]
    assert LAST_WORDS in said[1]
    assert not (parts / "model.safetensors").exists()
    codes, said = ends(start_both(corpus, parts))
    assert codes == [0, 0], said
    assert "newest complete checkpoint" in said[0]
    assert_close(tmp_path / "two", parts, 0)


def test_a_signal_to_one_process_stops_all_after_the_same_step(corpus, tmp_path):
    started = start_both(corpus, tmp_path / "out")
    until_saved(tmp_path / "out", 4, started)
    started[1].send_signal(signal.SIGTERM)
    codes, said = ends(started)
    assert codes == [128 + signal.SIGTERM] * 2, said
    step = complete_steps(tmp_path / "out" / "checkpoints")[-1]
    assert all(f"Stopped at step {step};" in text for text in said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num_processes 2", "give --coordinator_address and --process_id too"),
        ("--num_processes 2 --process_id 2 --coordinator_address a:1", "the 2 processes are 0 to 1"),
        ("--num_processes 2 --process_id 1 --coordinator_address a", "is no host:port"),
        ("--num_processes 2 --process_id 1 --coordinator_address :80", "is no host:port"),
        ("--num_processes 0 --process_id 0 --coordinator_address a:1", "must be at least 1"),
        ("--distributed off --process_id 1", "--distributed is off"),
        ("--distributed on", "is auto or off"),
        ("--heartbeat_timeout 0", "--heartbeat_timeout is 0"),
        ("--initialization_timeout 0", "--initialization_timeout is 0"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, said, corpus, tmp_path, capsys):
    capsys.readouterr()
    assert main([*words(corpus, tmp_path / "out", rows=1), *flags.split()]) == 2
    assert said in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_jax_finds_is_joined_and_off_leaves_it(corpus, tmp_path, monkeypatch, capsys):
    """What is handed to jax; what comes of it, the test of two processes shows."""
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *where, **times: joined.append((where, times)))
    monkeypatch.setattr("distaff.core.distributed._leave_a_witness", lambda: None)
    monkeypatch.setattr("distaff.tasks.clm.train", lambda flags: 0)
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "n[01-04]", "NTASKS": "4", "PROCID": "3", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    command = words(corpus, tmp_path / "out", rows=1)
    assert main([*command, "--distributed", "off"]) == 0
    assert joined == []
    assert main([*command, "--heartbeat_timeout", "30", "--initialization_timeout", "60"]) == 0
    (where, times), *rest = joined
    assert (where, rest) == ((None, 4, 3), [])
    assert times["heartbeat_timeout_seconds"] == 30
    assert times["initialization_timeout"] > 60
    # One task is a process alone, and pays for nothing.
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert main(command) == 0
    monkeypatch.setenv("SLURM_NTASKS", "many")
    assert main(command) == 2
    assert "looks like a cluster (slurm)" in capsys.readouterr().err
    assert len(joined) == 1


def test_processes_that_do_not_meet_end_with_one_sentence(corpus, tmp_path):
    place = "--coordinator_address 127.0.0.1:1 --num_processes 2 --process_id 1 --initialization_timeout 1"
    command = [sys.executable, "-m", "distaff.cli", *words(corpus, tmp_path / "out", *place.split(), rows=1)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 1
    assert "distaff: Not all of the 2 processes met at 127.0.0.1:1 within 1 s (this is process 1)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "stack trace" not in done.stderr


def test_one_process_agrees_with_itself():
    wait_for_all()
    assert agreed(lambda: [1, "a"]) == [1, "a"]
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec("x"))
    whole = gathered({"a": jax.device_put(np.arange(16.0), sharding), "b": np.ones(2)})
    assert whole["a"].tolist() == list(range(16))
    assert isinstance(whole["b"], np.ndarray)


def test_a_row_lies_in_one_process():
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    devices = [Device(index // 2) for index in range(4)]
    for sizes in ([4, 1, 1], [1, 4, 1], [1, 2, 2]):
        _check_processes(devices, sizes)
    _check_processes(devices[:2], [1, 1, 2])
    with pytest.raises(UsageError, match="divides 2"):
        _check_processes(devices, [1, 1, 4])


def test_a_run_that_ended_before_its_first_checkpoint_starts_again_if_any(corpus, tmp_path, capsys):
    folder = tmp_path / "out"
    (folder / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("recipe: clm\n")
    command = [*words(corpus, folder, rows=1), "--max_steps", "2"]
    assert main(command) == 0
    assert "Initialisation: 4. random weights" in capsys.readouterr().err
    assert main(command) == 0
    assert "All 2 steps were done before" in capsys.readouterr().err
    # A model without checkpoints is no run that could go on, and is never replaced silently.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    assert main([*words(corpus, tmp_path / "other", rows=1)]) == 2
    assert "is not empty" in one_line(capsys)
