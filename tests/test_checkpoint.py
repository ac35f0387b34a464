"""Checkpoints: complete or not there, on other devices, of another model, damaged, failing in the background."""

import json
import logging

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from distaff.core.errors import CheckpointError, UsageError
from distaff.core.mesh import make_mesh
from distaff.train import Checkpoints, abstract_state, create_state, read_params, restore
from distaff.train.checkpoint import complete_steps

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3, mask={"a": {"kernel": True, "bias": False}}),
    "adafactor": optax.adafactor(1e-3),
    "sgd": optax.sgd(1e-3),
    "noisy": optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.sgd(1e-3)),
}


def make_state(*, tx=OPTIMIZERS["adamw"], devices=1, width=8, names=("kernel", "bias"), fsdp=False, scale=1.0):
    mesh = make_mesh(devices=jax.devices()[:devices], data=1 if fsdp else -1, fsdp=devices if fsdp else 1)
    shapes = {"kernel": (16, width), "bias": (width,)}
    rng = np.random.default_rng(0)
    params = {"a": {name: (scale * rng.normal(size=shapes[name])).astype(np.float32) for name in names}}
    shardings = None
    if fsdp:
        spec = {"kernel": PartitionSpec("fsdp"), "bias": PartitionSpec()}
        shardings = {"a": {name: NamedSharding(mesh, spec[name]) for name in names}}
    return create_state(params, tx, mesh=mesh, seed=5, shardings=shardings)


def same(left, right):
    def numbers(leaf):
        return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((numbers(a) == numbers(b)).all()), left, right)))


def save(folder, state, steps=(1, 2, 3), keep=None, **meta):
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state, {"step": step, **meta})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_comes_back(tmp_path, name):
    state = make_state(tx=OPTIMIZERS[name])
    save(tmp_path, state, keep=2, note={"deep": [1, None]})
    assert complete_steps(tmp_path) == [2, 3]
    found, meta = restore(tmp_path, abstract_state(state))
    assert meta == {"step": 3, "note": {"deep": [1, None]}}
    assert same(found, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert jax.random.key_data(found.rng).tolist() == jax.random.key_data(state.rng).tolist()


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_restored_on_another_number_of_devices(tmp_path, devices):
    state = make_state(devices=4, fsdp=True)
    save(tmp_path, state, steps=[1])
    target = make_state(devices=devices, fsdp=True, scale=0.0)
    found, _ = restore(tmp_path, abstract_state(target))
    assert same(found, state)
    assert found.params["a"]["kernel"].sharding == target.params["a"]["kernel"].sharding


def test_a_step_is_replaced_and_the_params_can_be_read_alone(tmp_path):
    save(tmp_path, make_state(), steps=[1])
    changed = make_state(scale=2.0)
    save(tmp_path, changed, steps=[1], note="second")
    found, meta = restore(tmp_path, abstract_state(changed))
    assert meta["note"] == "second"
    assert same(found, changed)
    assert same(read_params(tmp_path / "1", abstract_state(changed).params), changed.params)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"width": 4}, r"params/a/bias is float32\[8\] there and float32\[4\] here"),
        ({"names": ("kernel",)}, "params/a/bias is not in the model or optimizer"),
        ({"tx": optax.sgd(0.1)}, "opt_state/0/count is not in the model or optimizer"),
    ],
    ids=["shape", "left over", "optimizer"],
)
def test_another_model_is_refused_in_one_sentence(tmp_path, other, words):
    save(tmp_path, make_state(), steps=[1])
    tx = other.pop("tx", optax.adamw(1e-3))
    with pytest.raises(CheckpointError, match=words) as caught:
        restore(tmp_path, abstract_state(make_state(tx=tx, **other)))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_what_is_missing_is_named(tmp_path):
    save(tmp_path, make_state(tx=optax.sgd(0.1), names=("kernel",)), steps=[1])
    with pytest.raises(CheckpointError, match="in 1 places: params/a/bias is missing"):
        restore(tmp_path, abstract_state(make_state(tx=optax.sgd(0.1))))


def test_other_folders_are_no_checkpoints(tmp_path):
    state = make_state()
    save(tmp_path, state, steps=[1])
    for name in ("checkpoint-abc", "7.orbax-checkpoint-tmp", "9"):
        (tmp_path / name).mkdir()
    assert complete_steps(tmp_path) == [1]
    _, meta = restore(tmp_path, abstract_state(state))
    assert meta["step"] == 1
    save(tmp_path, state, steps=[9])
    assert complete_steps(tmp_path) == [1, 9]


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    # One array only: Orbax reads several at once, and those beside the failing one report to a loop it has closed.
    state = make_state(tx=optax.sgd(0.1), names=("kernel",))
    save(tmp_path, state)
    largest = max((tmp_path / "3" / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with caplog.at_level(logging.WARNING, "distaff.train"):
        found, meta = restore(tmp_path, abstract_state(state))
    assert meta["step"] == 2
    assert same(found, state)
    assert f"The checkpoint {tmp_path / '3'} is damaged" in caplog.text
    assert "TensorStore" not in caplog.text
    with pytest.raises(CheckpointError, match="is damaged and cannot be read"):
        restore(tmp_path, abstract_state(state), step=3)


@pytest.mark.parametrize("name", ["params/_METADATA", "meta/metadata", "opt_state/_METADATA"])
def test_a_checkpoint_that_lacks_a_file_is_passed_over(tmp_path, caplog, name):
    state = make_state()
    save(tmp_path, state)
    (tmp_path / "3" / name).unlink()
    with caplog.at_level(logging.WARNING, "distaff.train"):
        found, meta = restore(tmp_path, abstract_state(state))
    assert meta["step"] == 2
    assert same(found, state)
    assert f"The checkpoint {tmp_path / '3'} is damaged" in caplog.text
    with pytest.raises(CheckpointError, match="is damaged and cannot be read"):
        restore(tmp_path, abstract_state(state), step=3)


def test_a_meta_that_is_no_object_is_damage(tmp_path):
    state = make_state()
    save(tmp_path, state, steps=[1])
    (tmp_path / "1" / "meta" / "metadata").write_text("[]")
    with pytest.raises(CheckpointError, match="is damaged and cannot be read"):
        restore(tmp_path, abstract_state(state))


def test_no_checkpoint_is_one_sentence(tmp_path):
    target = abstract_state(make_state())
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        restore(tmp_path / "none", target)
    save(tmp_path, make_state(), steps=[1])
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 4; complete: 1"):
        restore(tmp_path, target, step=4)


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot be written to"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_an_error_in_the_background_is_raised(tmp_path, monkeypatch):
    from orbax.checkpoint import JsonCheckpointHandler

    async def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(JsonCheckpointHandler, "async_save", fail)

    def save_and_leave():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, make_state(), {})

    with pytest.raises(CheckpointError, match=r"could not be written to .*: No space left on device\.$"):
        save_and_leave()
    assert complete_steps(tmp_path) == []


def test_donating_right_after_save_does_not_change_what_is_saved(tmp_path):
    state = make_state()
    change = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)
    params = state.params
    expected = jax.device_get(jax.tree.map(lambda leaf: leaf + 0, params))
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 4):
            checkpoints.save(step, state, {})
            params = change(state.params)
            state = make_state().replace(params=jax.tree.map(lambda leaf, step=step: leaf + step, params))
    assert same(read_params(tmp_path / "1", abstract_state(state).params), expected)
    assert json.loads((tmp_path / "2" / "meta" / "metadata").read_text()) == {}
