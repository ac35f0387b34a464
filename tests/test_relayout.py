"""A checkpoint is read on any mesh, by scanned and by looped layers, whatever padding the vocabulary has."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from distaff.core.errors import CheckpointError
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten, map_with_path
from distaff.train import OptimizerConfig, make_optimizer
from distaff.train.checkpoint import Checkpoints, complete_steps, read_trained, restore
from distaff.train.state import abstract_state, create_state
from test_mesh import KINDS

AUTO_CLASS, CONFIG = KINDS["gpt_neo"]


def state_on(devices, *, scan=False, seed=3, tx=None, **sizes):
    """A model on the first `devices`, with moments that are not zero."""
    mesh = make_mesh(devices=jax.devices()[:devices], **sizes)
    model = AUTO_CLASS.from_config(CONFIG, seed=seed, mesh=mesh, scan_layers=scan)
    tx = tx or optax.adamw(1e-3)
    state = create_state(model.params, tx, mesh=mesh, seed=seed)
    _, opt_state = tx.update(state.params, state.opt_state, state.params)
    return model, state.replace(opt_state=opt_state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state of looped layers on two by two devices, where a vocabulary of 61 has 62 entries, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    _, state = state_on(4, data=1, fsdp=2, tensor=2)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {"step": 1})
    return state, folder


def entries(state):
    """Parameters and first moments by path, without padding, layers apart."""
    found = {}
    for name, tree in (("params", state.params), ("mu", state.opt_state[0].mu)):
        for path, array in flatten(jax.device_get(tree)).items():
            array = array[:61] if path.endswith("wte/embedding") else array
            parts = {path: array}
            if "/stacked/" in path:
                parts = {path.replace("stacked", str(index)): each for index, each in enumerate(array)}
            found.update({f"{name}/{path}": each for path, each in parts.items()})
    return found


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("devices", "sizes"), [(1, {}), (2, {}), (8, {"data": 2, "fsdp": 1, "tensor": 4})])
def test_a_checkpoint_is_read_on_other_devices(saved, devices, sizes, scan):
    before, folder = saved
    model, fresh = state_on(devices, scan=scan, seed=4, **sizes)
    state, meta = restore(folder, abstract_state(fresh), filled=model.filled_shapes())
    assert meta == {"step": 1}
    ours, theirs = entries(before), entries(state)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(theirs[path], array, err_msg=path)
    placed, wanted = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state.params, fresh.params))
    assert placed == wanted
    table = state.params["transformer"]["wte"]["embedding"]
    assert not np.asarray(table)[61:].any()


def test_scanned_layers_are_read_apart(tmp_path):
    _, scanned = state_on(2, scan=True, data=1, tensor=2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, scanned, {})
    model, fresh = state_on(1, seed=4)
    state = read_trained(tmp_path / str(complete_steps(tmp_path)[0]), fresh, filled=model.filled_shapes())
    ours, theirs = entries(scanned), entries(state)
    for path in (path for path in ours if path.startswith("params/")):
        np.testing.assert_array_equal(theirs[path], ours[path], err_msg=path)


def split(mesh, path, leaf):
    """The sharding of a table of words or a kernel."""
    return NamedSharding(
        mesh, PartitionSpec(*(None,) * (leaf.ndim - 2), "tensor") if leaf.ndim > 1 else PartitionSpec()
    )


@pytest.mark.parametrize("name", ["adafactor", "sm3", "muon"])
def test_moments_of_every_form_are_read_in_other_layouts(name, tmp_path):
    """Of a table of 131 words, and layers, large enough that Adafactor keeps rows and columns; Muon keeps less of some."""
    config = OptimizerConfig(optimizer=name, learning_rate=1e-3)
    table = jax.random.normal(jax.random.key(0), (131, 128))
    layers = [{"kernel": jax.random.normal(jax.random.key(n), (128, 130)), "bias": jnp.ones(130)} for n in (1, 2)]

    def laid_out(tensor, *, scan, fresh):
        mesh = make_mesh(devices=jax.devices()[:tensor], tensor=tensor)
        apart = {str(index): layer for index, layer in enumerate(layers)}
        stack = {"stacked": jax.tree.map(lambda *each: jnp.stack(each), *layers)} if scan else apart
        params = {"words": jnp.pad(table, ((0, -131 % tensor), (0, 0))), "layers": stack}
        shardings = map_with_path(partial(split, mesh), params)
        matrices = map_with_path(lambda path, leaf: -2 * path.endswith("kernel"), params)
        tx, _ = make_optimizer(config, total_steps=4, matrices=matrices)
        state = create_state(params, tx, mesh=mesh, shardings=shardings)
        _, after = jax.jit(tx.update)(state.params, state.opt_state, state.params)
        return state if fresh else state.replace(opt_state=after)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, laid_out(4, scan=False, fresh=False), {})
    # SM3 keeps the largest of each axis of a stack, which that of its layers does not tell.
    scan = name != "sm3"
    wanted = laid_out(1, scan=scan, fresh=False)
    target = abstract_state(laid_out(1, scan=scan, fresh=True))
    state, _ = restore(tmp_path, target, filled={"words": (131, 128)})
    for path, want in jax.tree_util.tree_leaves_with_path(wanted.opt_state):
        have = dict(jax.tree_util.tree_leaves_with_path(state.opt_state))[path]
        # The mean over words had zeros of padding among them; Adafactor divides it by its own mean.
        scale = 131 / 132 if "v_row" in str(path) and "words" in str(path) else 1.0
        np.testing.assert_allclose(have, want * scale, rtol=1e-5, err_msg=str(path))


def test_words_are_not_cut_off(saved, tmp_path):
    """Padding is zeros. What is not is of a larger vocabulary."""
    state, _ = saved
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    _, fresh = state_on(1)
    filled = {"transformer/wte/embedding": (60, 32)}
    params = fresh.params["transformer"]
    smaller = {**params, "wte": {"embedding": params["wte"]["embedding"][:60]}}
    target = abstract_state(fresh.replace(params={"transformer": smaller}))
    with pytest.raises(CheckpointError, match="has a larger vocabulary than this run, in transformer/wte/embedding"):
        read_trained(tmp_path / "1", target, filled=filled)


def test_another_model_is_still_refused(saved):
    _, folder = saved
    model, fresh = state_on(1, tx=optax.sgd(0.1))
    with pytest.raises(CheckpointError, match="does not fit this run"):
        restore(folder, abstract_state(fresh), filled=model.filled_shapes())
    _, fresh = state_on(1)
    with pytest.raises(CheckpointError, match=r"wte/embedding is float32\[62, 32\] there and float32\[61, 32\] here"):
        restore(folder, abstract_state(fresh))
