"""Schedules at their extremes, the decay mask, AdamW against its formula, Adafactor against optax."""

import jax
import numpy as np
import optax
import pytest

from distaff.core.errors import UsageError
from distaff.train import OptimizerConfig, make_optimizer, make_schedule
from distaff.train.optim import SCHEDULES

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


def test_adamw_follows_its_formula():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.1, lr_scheduler_type="constant", adam_epsilon=1e-6)
    grad = np.cos(2.0)
    expected = 2.0 - 0.1 * (grad / (abs(grad) + 1e-6) + 0.1 * 2.0)
    np.testing.assert_allclose(updates(config, steps=1)["kernel"], expected, rtol=1e-5)


@pytest.mark.parametrize("adafactor", [False, True])
def test_decay_touches_what_the_mask_names(adafactor):
    settings = {"learning_rate": 0.1, "adafactor": adafactor, "lr_scheduler_type": "constant"}
    mask = {"kernel": True, "bias": False}
    plain = updates(OptimizerConfig(**settings), steps=1)
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
