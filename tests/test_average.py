"""The moving average of the parameters: its formula, what is evaluated and saved, resume bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distaff.core.errors import CheckpointError, UsageError
from distaff.core.mesh import make_mesh
from distaff.train import (
    LoopConfig,
    OptimizerConfig,
    Selection,
    create_state,
    fit,
    make_optimizer,
    make_train_step,
    place_rows,
)
from distaff.train.average import check_decay


def make_params():
    rng = np.random.default_rng(0)
    return {"in": rng.normal(size=(4, 8)).astype(np.float32), "out": rng.normal(size=8).astype(np.float32)}


def loss_fn(params, batch, rng):
    noise = 0 if rng is None else jax.random.normal(rng)
    errors = jnp.square(jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["x"].sum(axis=1) + noise)
    return {"loss": (errors.sum(), jnp.float32(len(errors)))}


def batches(step):
    return {"x": np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)}


def run(folder=None, *, steps=6, optimizer="adamw", moment_dtype=None, score=None, **settings):
    config = OptimizerConfig(optimizer=optimizer, moment_dtype=moment_dtype, learning_rate=0.03)
    tx, schedule = make_optimizer(config, total_steps=10)
    return fit(
        loss_fn,
        params=make_params(),
        tx=tx,
        schedule=schedule,
        batches=batches,
        score=score,
        mesh=make_mesh(devices=jax.devices()[:2]),
        config=LoopConfig(total_steps=steps, output_dir=folder, progress=False, report_to=(), **settings),
    )


def same(left, right):
    def numbers(leaf):
        return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((numbers(a) == numbers(b)).all()), left, right)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_starts_as_the_parameters_and_follows_them_ever_more_slowly(dtype):
    """Of bfloat16 it is float32, and what is evaluated has the parameters' dtype; what is frozen is its own average."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), make_params() | {"still": np.float32([0.1, 0.3])})
    mesh = make_mesh(devices=jax.devices()[:1])
    tx, _ = make_optimizer(
        OptimizerConfig(learning_rate=0.1), total_steps=10, trained={"in": True, "out": True, "still": False}
    )
    state = create_state(params, tx, mesh=mesh, averaged=True)
    step = make_train_step(loss_fn, tx, state=state, donate=False, ema_decay=0.2)
    expected = np.asarray(params["in"], np.float64)
    for number, decay in enumerate([1 / 10, 2 / 11, 0.2, 0.2]):
        state, _ = step(state, place_rows(batches(number), mesh))
        expected = decay * expected + (1 - decay) * np.asarray(state.params["in"], np.float64)
        # Compiled, the average sees what a step makes before it is rounded to bfloat16.
        np.testing.assert_allclose(state.average["in"], expected, rtol={"float32": 1e-5, "bfloat16": 2**-8}[dtype])
    assert {leaf.dtype for leaf in jax.tree.leaves(state.average)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.evaluated)} == {jnp.dtype(dtype)}
    assert same(state.evaluated["still"], params["still"])


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_stopped_and_resumed_equals_at_once(tmp_path, optimizer):
    settings = {"optimizer": optimizer, "moment_dtype": "bfloat16", "ema_decay": 0.9}
    whole = run(**settings)
    run(tmp_path, steps=3, **settings)
    resumed = run(tmp_path, resume="newest", **settings)
    assert resumed.step == 6
    assert same(resumed.state, whole.state)
    assert not same(resumed.params, resumed.state.params)


def test_evaluations_compare_it_and_the_best_is_reloaded(tmp_path):
    """Nothing of the training changes by it: the parameters are those of a run without."""
    seen = []

    def score(params):
        seen.append(jax.device_get(params))
        return {"accuracy": [0.1, 0.9, 0.5][len(seen) - 1]}

    chosen = Selection(metric="eval_accuracy")
    result = run(tmp_path, steps=3, score=score, ema_decay=0.9, eval_every=1, selection=chosen)
    plain = run(steps=2)
    assert same(result.state.params, plain.state.params)
    assert result.best.step == 2
    assert same(result.params, seen[1])
    assert not same(result.params, plain.params)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, 0.9, "holds no average of the parameters, and this run is with ema_decay"),
        (0.9, None, "holds an average of the parameters, and this run is without ema_decay"),
    ],
)
def test_a_run_with_an_average_does_not_go_on_without_or_the_reverse(tmp_path, first, second, words):
    run(tmp_path, steps=1, ema_decay=first)
    with pytest.raises(CheckpointError, match=words):
        run(tmp_path, ema_decay=second, resume="newest")


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_a_decay_that_averages_nothing_is_refused(decay):
    with pytest.raises(UsageError, match="must be above 0 and below 1"):
        check_decay(decay)
