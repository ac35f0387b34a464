"""One training step: sums, accumulation, devices, donation, NaN, evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from distaff.core.errors import DistaffError, UsageError
from distaff.core.mesh import make_mesh, replicated
from distaff.train import (
    TrainState,
    collect,
    create_state,
    debugging_nans,
    divide,
    evaluate,
    make_eval_step,
    make_train_step,
    perplexity,
    place_rows,
)
from distaff.train.measure import Compilations
from distaff.train.metrics import NO_STEP, add_steps


def make_params(seed=0, width=16):
    rng = np.random.default_rng(seed)
    return {
        "in": {"kernel": rng.normal(size=(6, width)).astype(np.float32), "bias": np.zeros(width, np.float32)},
        "out": {"kernel": rng.normal(size=(width, 3)).astype(np.float32)},
    }


def make_batch(rows=8, length=5, seed=0):
    """Tokens with labels, some of them weighted zero: another count in each row."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, length + 1, rows)
    counts[0] = length
    return {
        "x": rng.normal(size=(rows, length, 6)).astype(np.float32),
        "labels": rng.integers(0, 3, (rows, length)).astype(np.int32),
        "weights": (np.arange(length)[None] < counts[:, None]).astype(np.float32),
    }


def loss_fn(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["in"]["kernel"] + params["in"]["bias"][None, None])
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.999999, hidden.shape)
    logits = hidden @ params["out"]["kernel"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    weights = batch["weights"]
    right = (logits.argmax(-1) == batch["labels"]) * weights
    return {"loss": ((losses * weights).sum(), weights.sum()), "accuracy": (right.sum(), weights.sum())}


def run_steps(*, accumulation=1, devices=1, steps=3, tx=None, batch=None, fsdp=False):
    mesh = make_mesh(devices=jax.devices()[:devices], data=1 if fsdp else -1, fsdp=devices if fsdp else 1)
    params = make_params()
    shardings = None
    if fsdp:
        shardings = jax.tree.map(
            lambda leaf: NamedSharding(
                mesh, PartitionSpec("fsdp") if leaf.shape[0] % devices == 0 else PartitionSpec()
            ),
            params,
        )
    tx = optax.adamw(1e-2) if tx is None else tx
    state = create_state(params, tx, mesh=mesh, shardings=shardings)
    step = make_train_step(loss_fn, tx, state=state, accumulation=accumulation)
    losses = []
    for index in range(steps):
        placed = place_rows(make_batch(seed=index) if batch is None else batch, mesh, accumulation=accumulation)
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, placed)
        losses.append(divide(jax.device_get(metrics.sums))["loss"])
    return losses, jax.device_get(state.params)


def assert_close(left, right, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right)


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_accumulation_equals_one_large_batch(accumulation):
    losses, params = run_steps(tx=optax.sgd(0.1))
    others, accumulated = run_steps(accumulation=accumulation, tx=optax.sgd(0.1))
    assert_close(losses, others, 1e-6)
    assert_close(params, accumulated, 1e-6)


def test_accumulation_is_not_the_mean_of_means():
    batch = make_batch()
    halves = [jax.tree.map(lambda leaf, part=part: leaf[part], batch) for part in (slice(4), slice(4, 8))]
    assert halves[0]["weights"].sum() != halves[1]["weights"].sum()
    means = [divide(make_eval_step(loss_fn)(make_params(), half))["loss"] for half in halves]
    losses, _ = run_steps(accumulation=2, steps=1, batch=batch)
    assert abs(losses[0] - np.mean(means)) > 1e-4


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("fsdp", [False, True])
def test_devices_do_not_change_the_update(devices, fsdp):
    losses, params = run_steps()
    with Compilations("train_step") as compilations:
        others, spread = run_steps(devices=devices, fsdp=fsdp)
    assert_close(losses, others, 1e-5)
    assert_close(params, spread, 1e-5)
    assert compilations.counts == {"train_step": 1}


def test_accumulation_over_devices():
    losses, params = run_steps(tx=optax.sgd(0.1))
    others, spread = run_steps(accumulation=4, devices=2, tx=optax.sgd(0.1))
    assert_close(losses, others, 1e-5)
    assert_close(params, spread, 1e-5)


def test_state_is_donated_and_the_callers_params_are_not():
    mesh = make_mesh()
    params = jax.device_put(make_params(), NamedSharding(mesh, PartitionSpec()))
    tx = optax.adamw(1e-2)
    state = create_state(params, tx, mesh=mesh)
    step = make_train_step(loss_fn, tx, state=state)
    after, _ = step(state, place_rows(make_batch(), mesh))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params) + jax.tree.leaves(state.opt_state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert isinstance(after, TrainState)
    text = step.lower(after, place_rows(make_batch(), mesh)).compile().memory_analysis()
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(after.params)) * 3
    assert text.alias_size_in_bytes >= sizes


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_without_weight_has_zero_gradient(accumulation):
    batch = make_batch() | {"weights": np.zeros((8, 5), np.float32)}
    mesh = make_mesh(devices=jax.devices()[:1])
    tx = optax.adamw(1e-2, weight_decay=0.0)
    state = create_state(make_params(), tx, mesh=mesh)
    step = make_train_step(loss_fn, tx, state=state, accumulation=accumulation)
    state, metrics = step(state, place_rows(batch, mesh, accumulation=accumulation))
    assert_close(jax.device_get(state.params), make_params(), 0)
    assert divide(jax.device_get(metrics.sums)) == {"grad_norm": 0.0}
    assert int(metrics.bad_step) == NO_STEP


def test_the_first_bad_step_is_kept_over_a_window():
    mesh = make_mesh(devices=jax.devices()[:1])
    tx = optax.sgd(0.1)
    state = create_state(make_params(), tx, mesh=mesh)
    step = make_train_step(loss_fn, tx, state=state, schedule=lambda count: 0.1 * count)
    window = None
    for index in range(4):
        batch = make_batch()
        if index == 1:
            batch["x"][0, 0, 0] = np.nan
        state, metrics = step(state, place_rows(batch, mesh))
        window = metrics if window is None else add_steps(window, metrics)
    assert int(window.bad_step) == 2
    assert float(window.learning_rate) == pytest.approx(0.3)
    assert float(window.sums["grad_norm"][1]) == 4


def test_dropout_differs_by_step_and_micro_batch_and_repeats_with_the_seed():
    def noise(params, batch, rng):
        return {"loss": (jax.random.uniform(rng) + 0 * params["w"].sum(), jnp.float32(1))}

    mesh = make_mesh(devices=jax.devices()[:1])
    rows = {"x": np.zeros((4, 1), np.float32)}

    def values(seed):
        tx = optax.sgd(0.1)
        state = create_state({"w": np.ones(3, np.float32)}, tx, mesh=mesh, seed=seed)
        step = make_train_step(noise, tx, state=state, accumulation=2)
        found = []
        for _ in range(3):
            state, metrics = step(state, place_rows(rows, mesh, accumulation=2))
            found.append(float(metrics.sums["loss"][0]))
        return found

    assert values(1) == values(1)
    assert values(1) != values(2)
    assert len(set(values(1))) == 3


def test_bfloat16_parameters_keep_their_dtype():
    mesh = make_mesh(devices=jax.devices()[:1])
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), make_params())
    tx = optax.adamw(1e-2)
    state = create_state(params, tx, mesh=mesh)
    step = make_train_step(loss_fn, tx, state=state, accumulation=2)
    with Compilations("train_step") as compilations:
        for _ in range(2):
            state, _ = step(state, place_rows(make_batch(), mesh, accumulation=2))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert compilations.counts == {"train_step": 1}


def test_adafactor_moments_of_a_split_parameter_lie_where_they_can():
    mesh = make_mesh(fsdp=8, data=1)
    params = {"w": np.ones((256, 128), np.float32), "b": np.ones(128, np.float32)}
    shardings = {"w": NamedSharding(mesh, PartitionSpec("fsdp")), "b": NamedSharding(mesh, PartitionSpec("fsdp"))}
    state = create_state(params, optax.adafactor(1e-3), mesh=mesh, shardings=shardings)
    factored = state.opt_state[0]
    assert factored.v["b"].sharding.spec == PartitionSpec("fsdp")
    assert factored.v_row["w"].sharding.is_fully_replicated
    assert factored.v_row["b"].shape == (1,)


def test_debugging_nans_names_the_operation():
    def bad(params, batch, rng):
        return {"loss": (jnp.log(params["w"] - batch["x"][0, 0]).sum(), jnp.float32(1))}

    mesh = make_mesh(devices=jax.devices()[:1])
    tx = optax.sgd(0.1)
    state = create_state({"w": np.ones(3, np.float32)}, tx, mesh=mesh)
    step = make_train_step(bad, tx, state=state, donate=False)
    batch = place_rows({"x": np.full((2, 2), 3.0, np.float32)}, mesh)
    with pytest.raises(DistaffError, match=r"A NaN stopped step 1: .*\blog\b.*\.$"), debugging_nans("step 1"):
        step(state, batch)


def test_evaluation_does_not_depend_on_the_batch():
    data = make_batch(rows=24)
    results = []
    for rows in (1, 3, 8):

        def batches(index, rows=rows):
            return jax.tree.map(lambda leaf: leaf[index * rows : (index + 1) * rows], data)

        for devices in (1, 8):
            mesh = make_mesh(devices=jax.devices()[:devices])
            results.append(evaluate(loss_fn, params=make_params(), batches=batches, steps=24 // rows, mesh=mesh))
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-6)


def test_what_is_evaluated_may_lie_elsewhere():
    """On another mesh, on one device, or on the host."""
    data, one = make_batch(), make_mesh(devices=jax.devices()[:1])

    def rows(step):
        return data

    rows.rows, rows.steps_per_epoch, rows.indices = 8, 1, lambda step: (np.arange(8), np.ones(8))
    host, whole = make_params(), make_mesh(fsdp=8)
    wanted = evaluate(loss_fn, params=host, batches=rows, steps=1, mesh=one)
    places = (jax.devices()[3], replicated(make_mesh(devices=jax.devices()[4:])), replicated(whole), replicated(one))
    for place in places:
        params = jax.device_put(host, place)
        for mesh in (None, whole, one):
            assert evaluate(loss_fn, params=params, batches=rows, steps=1, mesh=mesh) == pytest.approx(wanted)
            found = collect(lambda params, batch: {"x": batch["x"]}, params=params, batches=rows, mesh=mesh)
            np.testing.assert_array_equal(np.stack(found["x"]), data["x"])


def test_evaluation_keeps_params_and_leaves_out_what_has_no_weight():
    batch = make_batch() | {"weights": np.zeros((8, 5), np.float32)}
    params = jax.tree.map(jnp.asarray, make_params())
    assert evaluate(loss_fn, params=params, batches=lambda index: batch, steps=2) == {}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("rows", "accumulation"), [(6, 1), (8, 3), (0, 1)], ids=["devices", "micro-batches", "empty"])
def test_rows_that_cannot_be_split_are_refused(rows, accumulation):
    with pytest.raises(UsageError, match=r"Batch array 'x' of shape \(\d, 2\) cannot be split"):
        place_rows({"x": np.zeros((rows, 2))}, make_mesh(), accumulation=accumulation)


@pytest.mark.parametrize(
    ("returned", "words"),
    [({"accuracy": (1.0, 1.0)}, '"loss" was missing'), ({"loss": 1.0}, "pair of scalars"), (1.0, "returns a dict")],
)
def test_a_loss_function_of_another_form_is_refused(returned, words):
    with pytest.raises(UsageError, match=words):
        make_eval_step(lambda params, batch, rng: returned)({}, {})


def test_perplexity_overflows_to_infinity():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == float("inf")
