"""Schedules at their extremes, the decay mask, optimizers against their formulas (Adafactor: optax), on a mesh too."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from distaff.core.errors import UsageError
from distaff.core.mesh import make_mesh
from distaff.core.tree import map_with_path
from distaff.train import OptimizerConfig, create_state, make_optimizer, make_schedule, make_train_step, place_rows
from distaff.train.optim import OPTIMIZERS, READERS, SCHEDULES

WARMED = [name for name in SCHEDULES if name != "constant"]


def rates(total, **settings):
    schedule = make_schedule(OptimizerConfig(**settings), total_steps=total)
    return np.array([float(schedule(step)) for step in range(total)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_first_step_has_the_peak(name):
    found = rates(10, learning_rate=0.5, lr_scheduler_type=name)
    assert found[0] == 0.5
    assert np.isfinite(found).all()
    assert (np.diff(found) <= 0).all()


@pytest.mark.parametrize("name", WARMED)
@pytest.mark.parametrize("warmup", [1, 4, 10])
def test_warmup_rises_from_zero_to_the_peak(name, warmup):
    found = rates(10, learning_rate=0.5, lr_scheduler_type=name, warmup_steps=warmup)
    np.testing.assert_allclose(found[:warmup], 0.5 * np.arange(warmup) / warmup, rtol=1e-6)
    if warmup < 10:
        assert found[warmup] == 0.5
    assert np.isfinite(found).all()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("settings", [{"learning_rate": 0.0}, {}], ids=["rate 0", "default"])
def test_one_step_and_rate_zero_are_finite(name, settings):
    assert np.isfinite(rates(1, lr_scheduler_type=name, **settings)).all()


def test_shapes_of_the_schedules():
    settings = {"learning_rate": 1.0, "warmup_steps": 2}
    np.testing.assert_allclose(rates(6, **settings), [0, 0.5, 1, 0.75, 0.5, 0.25], rtol=1e-6)
    cosine = rates(6, **settings, lr_scheduler_type="cosine")
    np.testing.assert_allclose(cosine[2:], 0.5 * (1 + np.cos(np.pi * np.arange(4) / 4)), rtol=1e-6)
    root = rates(9, **settings, lr_scheduler_type="inverse_sqrt")
    np.testing.assert_allclose(root[8], np.sqrt(2 / 8), rtol=1e-6)
    assert rates(6, **settings, lr_scheduler_type="constant_with_warmup").tolist() == [0, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "total", "words"),
    [
        ({"warmup_steps": 11}, 10, "warmup_steps 11 must lie between 0 and the 10 steps"),
        ({"warmup_steps": -1}, 10, "warmup_steps -1"),
        ({"lr_scheduler_type": "polynomial"}, 10, "'polynomial' is not known: choose one of linear"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 2}, 10, "use 'constant_with_warmup'"),
        ({}, 0, "at least one step"),
        ({"learning_rate": -1.0}, 10, "learning_rate must be zero or more"),
        ({"adam_beta2": 1.0}, 10, "adam_beta2 must be at least 0 and below 1"),
        ({"max_grad_norm": 0.0}, 10, "max_grad_norm must be above zero, or None"),
        ({"optimizer": "lamb"}, 10, "optimizer 'lamb' is not known: choose one of adamw, adafactor, lion"),
        ({"optimizer": "lion", "adafactor": True}, 10, "adafactor and optimizer 'lion' are two optimizers: give one"),
        ({"optimizer": "sgd", "sgd_momentum": 1.0}, 10, "sgd_momentum must be at least 0 and below 1"),
        ({"moment_dtype": "int8"}, 10, "moment_dtype must be float32 or bfloat16, not int8"),
        ({"optimizer": "sgd", "sgd_momentum": 0.0, "moment_dtype": "bfloat16"}, 10, "and sgd_momentum is 0"),
        ({"optimizer": "sgd", "adam_beta1": 0.8}, 10, "adam_beta1 is of adamw, lion, muon and does nothing under sgd"),
        ({"optimizer": "lion", "adam_epsilon": 1e-6}, 10, "adam_epsilon is of adamw, muon"),
        ({"sgd_momentum": 0.5}, 10, "sgd_momentum is of sgd and does nothing under adamw"),
        ({"adafactor": True, "moment_dtype": "bfloat16"}, 10, "does nothing under adafactor"),
        ({"optimizer": "sm3", "adam_beta2": 0.99}, 10, "does nothing under sm3"),
    ],
)
def test_what_cannot_be_is_refused(settings, total, words):
    with pytest.raises(UsageError, match=words):
        make_optimizer(OptimizerConfig(**settings), total_steps=total)


def updates(config, *, mask=None, steps=3, params=None):
    tx, _ = make_optimizer(config, total_steps=10, decay_mask=mask)
    return follow(tx, steps=steps, params=params)


def follow(tx, *, steps=3, params=None):
    params = {"kernel": np.full((4, 3), 2.0, np.float32), "bias": np.ones(3, np.float32)} if params is None else params
    state = tx.init(params)
    for step in range(steps):
        grads = jax.tree.map(lambda leaf, step=step: np.cos(leaf + step).astype(np.float32), params)
        change, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, change)
    return jax.device_get(params)


# Steps of the papers, before rate and decay: of the gradient, what was kept, and the number of the step from 1.


def adamw(grad, kept, step):
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * grad
    kept["v"] = 0.999 * kept.get("v", 0) + 0.001 * grad**2
    return kept["m"] / (1 - 0.9**step) / (np.sqrt(kept["v"] / (1 - 0.999**step)) + 1e-8)


def lion(grad, kept, step):
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2."""
    direction = np.sign(0.9 * kept.get("m", 0) + 0.1 * grad)
    kept["m"] = 0.99 * kept.get("m", 0) + 0.01 * grad
    return direction


def sgd(grad, kept, step):
    kept["m"] = 0.9 * kept.get("m", 0) + grad
    return kept["m"]


def sm3(grad, kept, step):
    """Anil et al. 2019 (arXiv 1901.11150), algorithm SM3-II, with rows and columns of a matrix as the cover."""
    if grad.ndim < 2:
        kept["all"] = kept.get("all", 0) + grad**2
        squares = kept["all"]
    else:
        rows, columns = (kept.get(name, np.zeros(size)) for name, size in zip(("rows", "columns"), grad.shape))
        squares = np.minimum(rows[:, None], columns[None]) + grad**2
        kept["rows"], kept["columns"] = squares.max(axis=1), squares.max(axis=0)
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * grad / np.sqrt(squares)
    return kept["m"]


def muon(grad, kept, step):
    """Jordan et al. 2024: Nesterov momentum made orthogonal; as large as AdamW's (arXiv 2502.16982, equation 4)."""
    if grad.ndim < 2:
        return adamw(grad, kept, step)
    kept["m"] = 0.95 * kept.get("m", 0) + 0.05 * grad
    matrix = 0.95 * kept["m"] / (1 - 0.95 ** (step + 1)) + 0.05 * grad / (1 - 0.95**step)
    matrix = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return 0.2 * np.sqrt(max(grad.shape)) * matrix


RULES = {rule.__name__: rule for rule in (adamw, lion, sgd, sm3, muon)}


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_follows_its_paper(name):
    config = OptimizerConfig(optimizer=name, learning_rate=0.1, weight_decay=0.1, lr_scheduler_type="constant")
    params = {"kernel": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), "bias": np.float32([1, 2, -1])}
    found = updates(config, params=params)
    for path, start in params.items():
        expected, kept = start.astype(np.float64), {}
        for step in range(3):
            expected = expected - 0.1 * (RULES[name](np.cos(expected + step), kept, step + 1) + 0.1 * expected)
        np.testing.assert_allclose(found[path], expected, rtol=1e-5, atol=1e-5, err_msg=path)


def test_muon_takes_matrices_of_a_stack_one_by_one_and_leaves_the_rest_to_adamw():
    config = OptimizerConfig(optimizer="muon", learning_rate=0.1)
    stack = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    params = {"stack": stack, "fused": stack.swapaxes(0, 1), "head": stack[0]}
    tx, _ = make_optimizer(config, total_steps=10, matrices={"stack": -2, "fused": -3, "head": 0})
    found = follow(tx, params=params)
    for index in range(2):
        alone = updates(config, params={"k": stack[index]})["k"]
        np.testing.assert_allclose(found["stack"][index], alone, atol=1e-6)
        np.testing.assert_allclose(found["fused"][:, index], alone, atol=1e-6)
    plain = updates(OptimizerConfig(learning_rate=0.1), params={"head": stack[0]})
    np.testing.assert_array_equal(found["head"], plain["head"])
    with pytest.raises(UsageError, match="this model trains none: take another optimizer"):
        updates(config, params={"b": np.ones(3, np.float32)})


@pytest.mark.parametrize("name", ["muon", "sm3"])
def test_what_is_frozen_is_no_matrix_of_the_optimizer(name):
    params = {name: np.full((4, 3), 2.0, np.float32) for name in ("kernel", "still")}
    config = OptimizerConfig(optimizer=name, learning_rate=0.1, weight_decay=0.1)
    masks = {"trained": {"kernel": True, "still": False}, "matrices": {"kernel": True, "still": True}}
    tx, _ = make_optimizer(config, total_steps=10, decay_mask={"kernel": True, "still": True}, **masks)
    found = follow(tx, params=params)
    assert (found["still"] == 2).all()
    np.testing.assert_allclose(found["kernel"], updates(config)["kernel"], rtol=1e-6)
    with pytest.raises(UsageError, match="trains none") if name == "muon" else contextlib.nullcontext():
        make_optimizer(config, total_steps=10, trained=masks["trained"], matrices={"kernel": False, "still": True})


def test_sm3_takes_numbers_too():
    found = updates(OptimizerConfig(optimizer="sm3", learning_rate=0.1), params={"w": np.ones((), np.float32)}, steps=1)
    np.testing.assert_allclose(found["w"], 1 - 0.1 * 0.1, rtol=1e-5)


@pytest.mark.parametrize("name", READERS["moment_dtype"])
def test_moments_in_bfloat16(name):
    params = {"kernel": np.full((4, 3), 2.0, np.float32), "bias": np.ones(3, np.float32)}
    config = {"optimizer": name, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    tx, _ = make_optimizer(OptimizerConfig(**config, moment_dtype="bfloat16"), total_steps=10)
    state = tx.init(params)
    halves = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bfloat16]
    assert sorted(leaf.shape for leaf in halves) == [(3,), (4, 3)]
    change, after = tx.update(params, state, params)
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    assert {leaf.dtype for leaf in jax.tree.leaves(change)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(follow(tx)["kernel"], updates(OptimizerConfig(**config))["kernel"], rtol=0.03)


LAYOUT = {"up": (None, "fsdp", "tensor"), "bias": (None, "tensor"), "down": (None, "tensor", "fsdp"), "head": ("fsdp",)}


def layers_loss(params, batch, rng):
    hidden = batch["x"]  # [rows, 8]
    for up, bias, down in zip(params["up"], params["bias"], params["down"]):
        hidden = hidden + jnp.tanh(hidden @ up + bias[None]) @ down
    errors = jnp.square(hidden @ params["head"] - batch["x"].sum(axis=1))
    return {"loss": (errors.sum(), jnp.float32(len(errors)))}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_mesh_moments_lie_as_parameters_and_the_loss_falls_as_on_one_device(name):
    shapes = {"up": (2, 8, 16), "bias": (2, 16), "down": (2, 16, 8), "head": (8,)}
    rng = np.random.default_rng(0)
    params = {path: (0.3 * rng.normal(size=shape)).astype(np.float32) for path, shape in shapes.items()}
    rows = {"x": rng.normal(size=(16, 8)).astype(np.float32)}
    rate = {"sgd": 0.01, "sm3": 0.3}.get(name, 0.03)
    config = OptimizerConfig(optimizer=name, learning_rate=rate, weight_decay=0.01)
    matrices = {path: path in ("up", "down") for path in shapes}
    tx, _ = make_optimizer(config, total_steps=20, matrices=matrices)

    def train(mesh, shardings):
        state = create_state(params, tx, mesh=mesh, shardings=shardings, averaged=True)
        step = make_train_step(layers_loss, tx, state=state, ema_decay=0.9)
        losses = []
        for _ in range(15):
            state, metrics = step(state, place_rows(rows, mesh))
            losses.append(float(metrics.sums["loss"][0]))
        return state, losses

    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    shardings = {path: NamedSharding(mesh, PartitionSpec(*axes)) for path, axes in LAYOUT.items()}
    _, alone = train(make_mesh(devices=jax.devices()[:1]), None)
    many, split = train(mesh, shardings)
    np.testing.assert_allclose(split, alone, rtol=1e-4)
    assert split[-1] < 0.5 * split[0]
    assert jax.tree.map(lambda leaf: leaf.sharding, many.average) == shardings
    found = dict.fromkeys(shapes, 0)

    def check(path, leaf):
        for owner in found.keys() & set(path.split("/")):
            if leaf.shape == shapes[owner]:
                assert leaf.sharding == shardings[owner], path
                found[owner] += 1

    map_with_path(check, many.opt_state)
    assert all(found.values()), found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_touches_what_the_mask_names(name):
    settings = {"learning_rate": 0.1, "optimizer": name, "lr_scheduler_type": "constant"}
    mask = {"kernel": True, "bias": False}
    plain = updates(OptimizerConfig(**settings), mask=mask, steps=1)
    decayed = updates(OptimizerConfig(**settings, weight_decay=0.1), mask=mask, steps=1)
    np.testing.assert_array_equal(plain["bias"], decayed["bias"])
    np.testing.assert_allclose(plain["kernel"] - decayed["kernel"], 0.1 * 0.1 * 2.0, rtol=1e-4)


def test_adafactor_is_that_of_the_old_scripts():
    config = OptimizerConfig(learning_rate=0.1, adafactor=True, warmup_steps=2)
    params = {"kernel": np.ones((128, 128), np.float32), "bias": np.ones(3, np.float32)}
    schedule = make_schedule(config, total_steps=10)
    old = follow(optax.adafactor(learning_rate=schedule), params=params)
    ours = updates(config, params=params)
    jax.tree.map(np.testing.assert_array_equal, old, ours)


def test_clipping_bounds_the_global_norm():
    config = OptimizerConfig(learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.5)
    tx, _ = make_optimizer(config, total_steps=10)
    clip_state = tx.init({"w": np.ones(4, np.float32)})
    grads = {"w": np.full(4, 10.0, np.float32)}
    _, state = tx.update(grads, clip_state, {"w": np.ones(4, np.float32)})
    moment = next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,))
    np.testing.assert_allclose(np.linalg.norm(moment) / 0.1, 0.5, rtol=1e-5)
