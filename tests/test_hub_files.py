"""Weight files: every format read and written, against the packages that define them, and the rules for folders, shards and saving."""

import json
import os
import subprocess
import sys
from pathlib import Path

import flax.serialization
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from distaff.core.errors import CheckpointError, DistaffError
from distaff.core.tree import unflatten
from distaff.hub import files, flax_msgpack, open_checkpoint, parse_size, save_msgpack, save_safetensors

BIN = Path(__file__).parent / "golden" / "bin"
BF16 = np.dtype(ml_dtypes.bfloat16)


def tensors() -> dict[str, np.ndarray]:
    """One tensor of each dtype and odd shape; views that are not contiguous among them."""
    rng = np.random.default_rng(0)
    made = {
        name: rng.integers(0, 100, (2, 3)).astype(name)
        for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
    }
    base = rng.normal(size=(4, 6)).astype(np.float32)
    made |= {"transposed": base.T, "sliced": base[1:3, ::2], "bfloat16": base.astype(BF16)}
    return made | {"bool": base > 0, "scalar": np.array(2.5, BF16), "empty": np.zeros((0, 3), np.float32)}


def assert_same(checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert set(checkpoint) == set(expected)
    for name, value in expected.items():
        assert checkpoint.shape(name) == checkpoint[name].shape == value.shape
        assert checkpoint.dtype(name) == checkpoint[name].dtype == value.dtype
        assert checkpoint[name].tobytes() == np.ascontiguousarray(value).tobytes()
        assert not checkpoint[name].flags.writeable


def flat(prefix: str = "") -> dict[str, np.ndarray]:
    return {f"params/layer/{name}": value for name, value in tensors().items()} | {"step": np.array(3)}


# Reading and writing against the reference packages


def test_safetensors_are_read_as_the_package_wrote_them(tmp_path):
    stored = {name: np.ascontiguousarray(value) for name, value in tensors().items()}
    stored["scalar"] = stored["scalar"].reshape(())
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt", "by": "x"})
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.files) == ("safetensors", (tmp_path / "model.safetensors",))
    assert checkpoint.metadata == {"format": "pt", "by": "x"}
    assert_same(checkpoint, stored)


def test_safetensors_are_written_as_the_package_reads_them(tmp_path):
    assert save_safetensors(tmp_path / "new", tensors()) == (tmp_path / "new" / "model.safetensors",)
    with safetensors.safe_open(tmp_path / "new" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in tensors().items():
        assert read[name].shape == value.shape
        assert read[name].tobytes() == np.ascontiguousarray(value).tobytes()
    assert_same(open_checkpoint(tmp_path / "new"), tensors())
    big_endian = {"a": np.arange(3, dtype=">f4")}
    save_safetensors(tmp_path / "new", big_endian.items())
    assert open_checkpoint(tmp_path / "new")["a"].tolist() == [0, 1, 2]


def test_tensors_are_views_of_the_file(tmp_path):
    save_safetensors(tmp_path, {"a": np.ones((64, 64), np.float32)})
    save_msgpack(tmp_path, {"a": np.ones((64, 64), np.float32)})
    for checkpoint in (open_checkpoint(tmp_path), open_checkpoint(tmp_path, name="flax_model.msgpack")):
        view = checkpoint["a"]
        assert not view.flags.owndata
        assert np.shares_memory(view, checkpoint["a"])
        save_safetensors(tmp_path, {"a": np.zeros((64, 64), np.float32)})
        assert view.sum() == 64 * 64  # the file that it came from lives on


def test_released_pages_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RELEASE_BYTES", 10_000)
    save_safetensors(tmp_path, {str(i): np.full((32, 32), i, np.float32) for i in range(20)})
    checkpoint = open_checkpoint(tmp_path)
    views = [checkpoint[str(i)] for i in range(20)]
    assert [view[0, 0] for view in views] == list(range(20))


@pytest.mark.parametrize("chunk", [2**30, 16])
def test_msgpack_is_what_flax_writes_and_reads(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk)
    monkeypatch.setattr(flax_msgpack, "CHUNK_BYTES", chunk)
    written = save_msgpack(tmp_path, flat())
    assert written == (tmp_path / "flax_model.msgpack",)
    reference = flax.serialization.to_bytes(unflatten(flat()))
    assert written[0].read_bytes() == reference
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "msgpack"
    assert_same(checkpoint, flat())
    restored = flax.serialization.msgpack_restore(written[0].read_bytes())
    assert np.array_equal(restored["params"]["layer"]["bfloat16"], tensors()["bfloat16"])


def test_msgpack_reads_every_leaf_that_flax_writes(tmp_path):
    leaves = {
        "numpy": np.float32(1.5),
        "complex": 1 + 2j,
        "wide": np.zeros((70_000,), np.int8),
        "deep": {"x": {"y": np.ones(2)}},
    }
    (tmp_path / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(leaves | {"none": {}}))
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint) == {"numpy", "complex", "wide", "deep/x/y"}
    assert (checkpoint["numpy"], checkpoint["complex"], checkpoint.shape("wide")) == (1.5, 1 + 2j, (70_000,))


@pytest.mark.parametrize("form", ["zip", "legacy", "compressed"])
def test_torch_files_without_torch(form):
    expected = dict(np.load(BIN / "expected.npz"))
    expected["bfloat16"] = expected["bfloat16"].astype(BF16)
    checkpoint = open_checkpoint(BIN, name=f"{form}.bin")
    assert checkpoint.format == "bin"
    assert_same(checkpoint, expected)
    assert np.shares_memory(checkpoint["base"], checkpoint["tied"])
    assert np.shares_memory(checkpoint["base"], checkpoint["transposed"])


def test_torch_dtypes_without_a_storage_class():
    checkpoint = open_checkpoint(BIN, name="uint16.bin")
    assert (checkpoint["small"].tolist(), checkpoint.dtype("small")) == ([1, 2], np.uint16)


# Folders, preference, shards


def test_the_preferred_format_is_taken(tmp_path):
    save_msgpack(tmp_path, {"a": np.ones(1)})
    assert open_checkpoint(tmp_path).format == "msgpack"
    (tmp_path / "pytorch_model.bin").write_bytes((BIN / "zip.bin").read_bytes())
    assert open_checkpoint(tmp_path).format == "bin"
    save_safetensors(tmp_path, {"a": np.ones(2), "b": np.ones(2)}, max_shard_size=16)
    assert open_checkpoint(tmp_path).format == "safetensors"
    assert open_checkpoint(tmp_path, name="flax_model.msgpack").format == "msgpack"


def test_folders_without_weights_are_refused_with_the_names_looked_for(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    assert all(name in str(refusal.value) for name in (str(tmp_path), *files.WEIGHT_NAMES))
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "mispelt")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        open_checkpoint(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"looked for other\.bin"):
        open_checkpoint(tmp_path, name="other.bin")
    (tmp_path / "weights.npz").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="in no known format"):
        open_checkpoint(tmp_path, name="weights.npz")


def test_a_folder_with_spaces_and_letters_beyond_ascii(tmp_path):
    folder = tmp_path / "größe 東京"
    save_safetensors(folder, tensors())
    assert_same(open_checkpoint(folder), tensors())


@pytest.mark.parametrize("save", [save_safetensors, save_msgpack])
def test_shards_equal_one_file(save, tmp_path):
    written = save(tmp_path, tensors(), max_shard_size="100B")
    index = json.loads(written[-1].read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors().values())
    assert set(index["weight_map"]) == set(tensors())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) == len(written) - 1 > 3
    assert all(shard.endswith(f"-of-{len(shards):05d}{written[0].suffix}") for shard in shards)
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(path.name for path in checkpoint.files) == shards
    assert_same(checkpoint, tensors())


def test_msgpack_shards_are_nested_trees_for_the_old_loader(tmp_path):
    written = save_msgpack(tmp_path, {"a/b": np.ones(2), "a/c": np.ones(2)}, max_shard_size=16)
    assert [path.name for path in written] == [
        "flax_model-00001-of-00002.msgpack", "flax_model-00002-of-00002.msgpack", "flax_model.msgpack.index.json",
    ]  # fmt: skip
    assert list(flax.serialization.msgpack_restore(written[0].read_bytes())["a"]) == ["b"]


def sharded(folder: Path) -> Path:
    save_safetensors(folder, {f"w{i}": np.full(2, i, np.float32) for i in range(3)}, max_shard_size=8)
    save_msgpack(folder, {"w": np.ones(1)})
    return folder / "model.safetensors.index.json"


def test_broken_shards_are_refused_by_name(tmp_path):
    index = sharded(tmp_path)
    intact = index.read_text()
    index.write_text(intact.replace('"w1"', '"absent"').replace('"w2"', '"gone"'))
    with pytest.raises(CheckpointError, match="names 2 tensors") as refusal:
        open_checkpoint(tmp_path)
    assert "absent (model-00002-of-00003.safetensors)" in str(refusal.value)
    assert "gone (model-00003-of-00003.safetensors)" in str(refusal.value)
    for content, cause in (
        ("{", "not an index"), ('{"weight_map": {}}', "not an index"), ('{"weight_map": {"w0": 3}}', "not an index"),
        (intact.replace("model-00001", "../model-00001"), "not a file name in its own folder"), ("", "is empty"),
    ):  # fmt: skip
        index.write_text(content)
        with pytest.raises(CheckpointError, match=cause):
            open_checkpoint(tmp_path)
    index.write_text(intact)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2 of 3 shards") as refusal:
        open_checkpoint(tmp_path)
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in str(refusal.value)


def test_torch_shards_and_tensors_that_the_index_leaves_out(tmp_path):
    names = {"one.bin": "zip.bin", "two.bin": "uint16.bin"}
    for name, source in names.items():
        (tmp_path / name).write_bytes((BIN / source).read_bytes())
    index = {"metadata": {}, "weight_map": {"base": "one.bin", "small": "two.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint) == {*np.load(BIN / "expected.npz"), "small"}
    (tmp_path / "two.bin").write_bytes((BIN / "legacy.bin").read_bytes())
    index["weight_map"]["half"] = "two.bin"
    del index["weight_map"]["small"]
    index["weight_map"]["tied"] = "two.bin"
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="in two shards"):
        open_checkpoint(tmp_path)


# Saving


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("save", [save_safetensors, save_msgpack])
def test_a_save_replaces_what_was_there_whatever_its_shards(save, tmp_path):
    (tmp_path / "model_notes.safetensors").write_bytes(b"not ours")
    for limit in ("5GB", 100, 60, 100, "1GB"):
        written = save(tmp_path, tensors(), max_shard_size=limit)
        assert names(tmp_path) == {path.name for path in written} | {"model_notes.safetensors"}
        assert_same(open_checkpoint(tmp_path), tensors())


def test_an_error_while_saving_leaves_the_old_files(tmp_path):
    sharded(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def broken():
        yield "a", np.ones(100)
        raise RuntimeError("the device was lost")

    def unsupported():
        yield "a", np.ones(100)
        yield "b", np.ones(3, np.complex128)

    def twice():
        yield "a", np.ones(1)
        yield "a", np.ones(1)

    with pytest.raises(RuntimeError, match="device"):
        save_safetensors(tmp_path, broken(), max_shard_size=8)
    with pytest.raises(CheckpointError, match="'b', which is complex128"):
        save_safetensors(tmp_path, unsupported(), max_shard_size=8)
    with pytest.raises(CheckpointError, match="'a' twice"):
        save_safetensors(tmp_path, twice())
    with pytest.raises(CheckpointError, match="no weights"):
        save_safetensors(tmp_path, {})
    with pytest.raises(CheckpointError, match="'a', which is object"):
        save_msgpack(tmp_path, {"a": np.array([None])})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_the_old_files(tmp_path):
    """The file size limit of a process stands in for a full disk: writing fails with an OSError midway."""
    sharded(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    script = """
import resource, signal, sys
import numpy as np
from distaff.core.errors import DistaffError
from distaff.hub import save_safetensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_safetensors(sys.argv[1], {"a": np.ones(1000), "b": np.ones(1_000_000)}, max_shard_size=10_000)
except DistaffError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Cannot save weights in '{tmp_path}': File too large")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DistaffError, match="Cannot save weights in") as refusal:
        save_safetensors(tmp_path / "file" / "model", tensors())
    assert str(tmp_path / "file" / "model") in str(refusal.value)


def test_a_kill_while_shards_are_renamed_is_never_taken_for_complete(tmp_path, monkeypatch):
    sharded(tmp_path)
    for path in tmp_path.glob("flax*"):
        path.unlink()
    replace, calls = os.replace, []

    def stop_at_the_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save_safetensors(tmp_path, {f"w{i}": np.full(2, 9, np.float32) for i in range(3)}, max_shard_size=8)
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)


def test_sizes():
    sizes = {"5GB": 5 * 10**9, "200MB": 2 * 10**8, "1.5 KiB": 1536, 7: 7, "7": 7, "3b": 3}
    assert {size: parse_size(size) for size in sizes} == sizes
    for wrong in ("", "GB", "-5GB", "0", 0, "5 apples", "1e9", "0.1B"):
        with pytest.raises(DistaffError, match="is not a size"):
            parse_size(wrong)
