"""What a step for eight chips of a v5e sends and needs, as the compiler of TPUs makes it; no TPU is needed."""

import functools
import os
import subprocess
import sys

import pytest

from distaff.core.errors import UsageError
from distaff.tasks import _slices, clm, fit

pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'distaff[tpu]'")

LAYERS, WIDTH, LENGTH, ROWS = 2, 128, 128, 2


@functools.cache
def compiled(mesh, vocabulary=1024, topology="v5e-8"):
    shape = f"n_layer={LAYERS},n_embd={WIDTH},n_head=8,n_positions={LENGTH},vocab_size={vocabulary}"
    flags = clm.ClmFlags(
        model_type="gpt2",
        config_overrides=shape,
        block_size=LENGTH,
        per_device_train_batch_size=ROWS,
        dtype="bfloat16",
        mesh=mesh,
    )
    return fit.compiled("clm", flags, fit.FitFlags(topology=topology))


def sent(mesh, **options):
    return {each.kind: each for each in compiled(mesh, **options).footprint.collectives}


def test_data_parallel_steps_only_add_gradients_up():
    found = sent("data=8")
    # One for the sums in float32 (norms, the table of words as outputs), one for what is computed in bfloat16.
    assert {kind: each.count for kind, each in found.items()} == {"all-reduce": 2}
    parameters = compiled("data=8").parameters
    table = 4 * 1024 * WIDTH  # its gradient as outputs is apart from that as inputs
    assert 2 * parameters <= found["all-reduce"].bytes <= 2 * parameters + table * 1.1


def test_fully_sharded_steps_gather_parameters_and_scatter_gradients():
    found, whole = sent("fsdp=8"), sent("data=8")["all-reduce"]
    # Four kernels a layer, forwards and backwards, and the two tables.
    assert found["all-gather"].count == LAYERS * 4 * 2 + 2
    # The compiler fuses the reductions of all kernels and tables, of which each chip keeps a part.
    assert found["reduce-scatter"].count == 2
    assert found["reduce-scatter"].bytes == pytest.approx(whole.bytes, rel=0.02)
    # What is left to all-reduce are biases, norms and scalars, which no chip shares out.
    assert found["all-reduce"].bytes < 0.01 * whole.bytes
    held = [compiled(mesh).footprint for mesh in ("fsdp=8", "data=8")]
    assert held[0].parameters <= held[1].parameters / 8 * 1.05
    assert held[0].optimizer <= held[1].optimizer / 8 * 1.05


def test_tensor_parallel_steps_reduce_activations_twice_a_layer_and_pass():
    found = sent("tensor=8")
    assert set(found) == {"all-reduce"}
    # And five: the looked-up words, the loss's largest logits, sums and labels' logits, and the gradients' norm.
    assert found["all-reduce"].count == LAYERS * 2 * 2 + 5
    assert found["all-reduce"].largest == ROWS * LENGTH * WIDTH * 2  # activations of all rows, in bfloat16
    # Twice the vocabulary, padded because it does not divide: as often and as large.
    larger = sent("tensor=8", vocabulary=2041)
    assert set(larger) == {"all-reduce"}
    assert larger["all-reduce"].count == found["all-reduce"].count
    assert larger["all-reduce"].bytes == pytest.approx(found["all-reduce"].bytes, rel=0.001)


def test_what_does_not_fit_says_how_much_is_needed():
    answer = compiled("data=8", vocabulary=8_000_000)
    assert not answer.fits(None)
    assert answer.footprint.limit == pytest.approx(15.75 * 2**30)
    assert answer.footprint.needed > answer.footprint.limit


def test_every_slice_with_a_name_has_meshes():
    program = """
from distaff.core.mesh import parse_mesh
from distaff.tasks._slices import RENTED, described_devices
for name in (*RENTED, "v4:2x2x2", "tpu7x:2x2x1"):
    devices = described_devices(name)
    for mesh in ("data=-1", "fsdp=-1", "fsdp=-1,tensor=2")[: 2 if len(devices) == 1 else 3]:
        assert parse_mesh(mesh, devices).size == len(devices), name
"""
    environment = {**os.environ, **_slices.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_two_processes_compile_side_by_side():
    program = "from distaff.tasks._slices import described_devices; described_devices('v5e-1')"
    twice = f"{program}; import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {program!r}]))"
    environment = {**os.environ, **_slices.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", twice], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_slice_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="no slice that libtpu can describe"):
        compiled("data=-1", topology="v5e:3x5")
