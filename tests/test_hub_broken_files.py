"""Broken, malicious and unsupported weight files: each is refused in a sentence that names the file and the cause."""

import contextlib
import io
import json
import pickle
import struct
import zipfile

import msgpack
import numpy as np
import pytest

from distaff.core.errors import CheckpointError
from distaff.hub import open_checkpoint, save_msgpack
from test_hub_files import BIN, flat

# Refusals of PyTorch files


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("evil_zip", "asks for posix.system"),
        ("evil_legacy", "asks for posix.system"),
        ("evil_plain", "not a PyTorch checkpoint"),
        ("nested", "not a flat mapping of names to tensors: 'state_dict'"),
        ("complex", "ComplexFloatStorage"),
        ("sparse", "_rebuild_sparse_tensor"),
    ],
)
def test_torch_files_that_are_refused(name, cause, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=cause) as refusal:
        open_checkpoint(BIN, name=f"{name}.bin")
    assert f"{name}.bin" in str(refusal.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_torch_files_cut_anywhere_are_refused(form, tmp_path):
    content = (BIN / f"{form}.bin").read_bytes()
    path = tmp_path / "pytorch_model.bin"
    for size in range(0, len(content) - 1, max(1, len(content) // 60)):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_damaged_torch_files_are_read_or_refused(form, tmp_path):
    """A flipped byte may change a value; it must not crash, and no view may reach beyond the file."""
    content = bytearray((BIN / f"{form}.bin").read_bytes())
    rng = np.random.default_rng(1)
    for position in rng.integers(0, len(content), 150):
        damaged = content.copy()
        damaged[position] ^= 1 << rng.integers(0, 8)
        (tmp_path / "pytorch_model.bin").write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            checkpoint = open_checkpoint(tmp_path)
            assert all(checkpoint[name].tobytes() is not None for name in checkpoint)


def rebuilt(offset, shape, strides) -> bytes:
    """Return a zip file whose pickle describes one float tensor in this way, over six floats."""

    def push(value) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(" + push("storage") + b"ctorch\nFloatStorage\n" + push("0") + push("cpu") + push(6) + b"tQ"
    arguments = b"(" + storage + push(offset) + push(shape) + push(strides) + b"t"
    state = b"\x80\x02}" + push("w") + b"ctorch._utils\n_rebuild_tensor\n" + arguments + b"Rs."
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", state)
        archive.writestr("archive/data/0", np.arange(6, dtype=np.float32).tobytes())
    return packed.getvalue()


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (7,), (1,)), (1, (6,), (1,)), (0, (2, 3), (4, 1)), (10**18, (1,), (1,)), (0, (2**62, 2**62), (0, 0)),
     (-1, (2,), (1,)), (5, (2,), (-1,)), (0, (2,), (1, 1)), (0, (True,), (1,)), (0, (1.5,), (1,)), ("0", (2,), (1,))],
)  # fmt: skip
def test_tensors_beyond_their_storage_are_refused(offset, shape, strides, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(rebuilt(offset, shape, strides))
    with pytest.raises(CheckpointError, match="'w'"):
        open_checkpoint(tmp_path)["w"]
    (tmp_path / "pytorch_model.bin").write_bytes(rebuilt(1, (2, 2), (2, 1)))
    assert open_checkpoint(tmp_path)["w"].tolist() == [[1, 2], [3, 4]]


# Refusals of the other formats


def header(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"\x08", "not a safetensors file"),
        (b'{"error": "not found"}', "not a safetensors file"),
        (struct.pack("<Q", 4000) + b"{", "truncated inside its header"),
        (struct.pack("<Q", 4) + b"{ooo", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a mapping"),
        (header({"w": ENTRY}, b"1234"), "truncated: its header describes 8 bytes"),
        (header({"w": ENTRY}, b"123456789"), "1 bytes follow"),
        (header({"w": ENTRY | {"dtype": "F6"}}, b"12345678"), "'w' as F6"),
        (header({"w": ENTRY | {"shape": [3]}}, b"12345678"), "cannot take 8 bytes"),
        (header({"w": ENTRY | {"shape": [-2]}}, b"12345678"), "entry of 'w'"),
        (header({"w": ENTRY | {"data_offsets": [8, 0]}}, b"12345678"), "cannot take"),
        (header({"w": {}}), "entry of 'w'"),
        (header({"w": ENTRY, "v": ENTRY}, b"12345678"), "overlap"),
        (header({"w": ENTRY | {"data_offsets": [8, 16]}}, b"1" * 16), "gap at byte 0"),
    ],
)
def test_broken_safetensors_are_refused_and_nothing_else_is_read(content, cause, tmp_path):
    save_msgpack(tmp_path, flat())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=cause) as refusal:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(refusal.value)


def array(shape, dtype, content: bytes, code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, content), use_bin_type=True))


@pytest.mark.parametrize(
    ("tree", "cause"),
    [
        ([1, 2], "holds list, not named tensors"),
        ({"a": {"b": "text"}}, "str instead of a tensor at 'a/b'"),
        ({"a": array([3], "float32", b"1234")}, "cannot take 4 bytes"),
        ({"a": array([-1], "float32", b"1234")}, "malformed"),
        ({"a": array([1], "object", b"12345678")}, "'object', which is not a numeric dtype"),
        ({"a": array([1], "nonsense", b"1234")}, "not a numeric dtype"),
        ({"a": array([1], "float32", b"1234", code=9)}, "unknown extension"),
        (
            {"a": {"__msgpack_chunked_array__": True, "shape": {"0": 5}, "chunks": {"0": array([1], "int8", b"1")}}},
            "chunked",
        ),
        ({"a": {"__msgpack_chunked_array__": True}}, "chunked"),
    ],
)
def test_broken_msgpack_is_refused(tree, cause, tmp_path):
    (tmp_path / "flax_model.msgpack").write_bytes(msgpack.packb(tree))
    with pytest.raises(CheckpointError, match=cause):
        open_checkpoint(tmp_path)


def test_msgpack_cut_or_damaged_anywhere_is_refused(tmp_path):
    (path,) = save_msgpack(tmp_path, flat())
    content = path.read_bytes()
    for size in range(0, len(content), 13):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"flax_model\.msgpack"):
            open_checkpoint(tmp_path)
    path.write_bytes(content + b"\xc0")
    with pytest.raises(CheckpointError, match="1 bytes follow"):
        open_checkpoint(tmp_path)
    path.write_bytes(b"\x91" * 500)
    with pytest.raises(CheckpointError, match="levels deep"):
        open_checkpoint(tmp_path)
    rng = np.random.default_rng(2)
    for position in rng.integers(0, len(content), 200):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.integers(0, 8)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            checkpoint = open_checkpoint(tmp_path)
            assert all(checkpoint[name].tobytes() is not None for name in checkpoint)
