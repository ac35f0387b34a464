"""What a loss function hands on besides gradients, such as the running statistics of a BatchNorm."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import linen as nn

import distaff
from battery.family import assert_trees_equal
from distaff.core.errors import CheckpointError, UsageError
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from distaff.train import LoopConfig, create_state, evaluate, fit, make_train_step, place_rows

CONFIG = transformers.ResNetConfig(
    num_channels=1, embedding_size=4, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3
)


@pytest.fixture(scope="module")
def model():
    return distaff.FlaxResNetForImageClassification(CONFIG)


def loss_of(model):
    def loss_fn(params, batch, rng, carried):
        training = rng is not None
        answer = model(batch["pixels"], batch["weights"], params={"params": params, **carried}, train=training)
        outputs, carried = answer if training else (answer, carried)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits, batch["labels"])
        return {"loss": ((losses * batch["weights"]).sum(), batch["weights"].sum())}, carried

    return loss_fn


def batches(step):
    rng = np.random.default_rng(step)
    weights = np.ones(8, np.float32)
    weights[6:] = step % 2  # two rows only fill every second batch
    labels = rng.integers(0, 3, 8).astype(np.int32)
    return {"pixels": rng.normal(size=(8, 1, 16, 16)).astype(np.float32), "labels": labels, "weights": weights}


def run(model, steps, *, devices=1, accumulation=1, folder=None, **settings):
    params = model.params
    return fit(
        loss_of(model),
        params=params["params"],
        carried={"batch_stats": params["batch_stats"]},
        tx=optax.adamw(1e-2, weight_decay=0.1),
        batches=batches,
        mesh=make_mesh(devices=jax.devices()[:devices]),
        config=LoopConfig(total_steps=steps, accumulation=accumulation, output_dir=folder, progress=False, **settings),
    )


def test_statistics_follow_the_batches_and_nothing_else(model):
    """Each step's are those of calls by hand with the parameters of that step; neither trained nor decayed."""
    params, carried = model.params["params"], {"batch_stats": model.params["batch_stats"]}
    tx = optax.sgd(0.1)
    state = create_state(params, tx, mesh=make_mesh(devices=jax.devices()[:1]), carried=carried)
    step = make_train_step(loss_of(model), tx, state=state, donate=False)
    for number in range(2):
        batch = batches(number)
        _, expected = model(
            batch["pixels"], batch["weights"], params={"params": state.params, **state.carried}, train=True
        )
        state, _ = step(state, jax.tree.map(jnp.asarray, batch))
        assert_trees_equal(state.carried, expected, atol=1e-6)
    assert_trees_equal(carried, {"batch_stats": model.params["batch_stats"]})


def test_micro_batches_come_one_after_the_other(model):
    """Accumulation moves the statistics once for each micro-batch, in their order."""
    tx, batch = optax.sgd(0.1), batches(1)
    carried = {"batch_stats": model.params["batch_stats"]}
    mesh = make_mesh(devices=jax.devices()[:1])
    state = create_state(model.params["params"], tx, mesh=mesh, carried=carried)
    step = make_train_step(loss_of(model), tx, state=state, accumulation=2)
    expected = carried
    for rows in (slice(0, 4), slice(4, 8)):
        _, expected = model(
            batch["pixels"][rows],
            batch["weights"][rows],
            params={"params": model.params["params"], **expected},
            train=True,
        )
    state, _ = step(state, place_rows(batch, mesh, accumulation=2))
    assert_trees_equal(state.carried, expected, atol=1e-6)
    assert {float(leaf) for path, leaf in flatten(state.carried).items() if path.endswith("count")} == {2.0}


@pytest.mark.parametrize("devices", [2, 4])
def test_many_devices_have_the_statistics_of_the_whole_batch(model, devices):
    one, many = run(model, 3), run(model, 3, devices=devices)
    assert_trees_equal(one.state.carried, many.state.carried, atol=1e-5)
    assert_trees_equal(one.state.params, many.state.params, atol=1e-3)


def test_stopped_and_resumed_equals_at_once(model, tmp_path):
    whole = run(model, 4)
    run(model, 2, folder=tmp_path)
    resumed = run(model, 4, folder=tmp_path, resume="newest")
    assert resumed.step == 4
    assert_trees_equal(resumed.state.carried, whole.state.carried)
    assert_trees_equal(resumed.state.params, whole.state.params)


def test_evaluation_uses_them_and_changes_nothing(model):
    state = run(model, 2).state
    before = jax.tree.map(np.asarray, state.carried)
    mesh = make_mesh(devices=jax.devices()[:1])
    found = evaluate(loss_of(model), params=state.params, batches=batches, steps=3, carried=state.carried, mesh=mesh)
    totals = []
    for number in range(3):
        batch = batches(number)
        logits = model(batch["pixels"], params={"params": state.params, **state.carried}).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        totals.append(((losses * batch["weights"]).sum(), batch["weights"].sum()))
    assert abs(found["loss"] - sum(total for total, _ in totals) / sum(weight for _, weight in totals)) < 1e-5
    assert_trees_equal(state.carried, before)


def test_a_checkpoint_of_a_run_that_carries_nothing_is_refused(tmp_path):
    config = LoopConfig(total_steps=2, output_dir=tmp_path, progress=False)

    def plain(params, batch, rng):
        return {"loss": ((params["w"] * batch["x"]).sum(), 2.0)}

    def carrying(params, batch, rng, carried):
        return plain(params, batch, rng), {"n": carried["n"] + 1}

    settings = {
        "params": {"w": np.ones(2, np.float32)},
        "tx": optax.sgd(0.1),
        "mesh": make_mesh(devices=jax.devices()[:1]),
    }
    data = lambda step: {"x": np.ones(2, np.float32)}  # noqa: E731
    fit(plain, batches=data, config=config, **settings)
    again = LoopConfig(total_steps=3, output_dir=tmp_path, progress=False, resume="newest")
    with pytest.raises(CheckpointError, match="running statistics"):
        fit(carrying, batches=data, config=again, carried={"n": np.zeros((), np.float32)}, **settings)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda sums, carried: sums, "(sums, carried)"),
        (lambda sums, carried: (sums, {}), "structure, shapes and dtypes"),
        (lambda sums, carried: (sums, {"n": carried["n"].astype(jnp.int32)}), "structure, shapes and dtypes"),
    ],
)
def test_what_is_not_carried_on_is_refused(answer, words):
    def loss_fn(params, batch, rng, carried):
        return answer({"loss": ((params["w"] * batch["x"]).sum(), 2.0)}, carried)

    tx, carried = optax.sgd(0.1), {"n": np.zeros((), np.float32)}
    state = create_state({"w": np.ones(2, np.float32)}, tx, mesh=make_mesh(devices=jax.devices()[:1]), carried=carried)
    with pytest.raises(UsageError) as caught:
        make_train_step(loss_fn, tx, state=state)(state, {"x": jnp.ones(2)})
    assert words in str(caught.value)


class Own(nn.Module):
    """A user's module, with Flax's own BatchNorm."""

    config: object = None
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, input_ids, *, deterministic=True):
        hidden = nn.Dense(4)(input_ids)
        return nn.BatchNorm(use_running_average=deterministic)(hidden)


class OwnModel(distaff.FlaxPreTrainedModel):
    config_class = transformers.PretrainedConfig
    main_input_name = "input_values"
    module_class = Own
    draws_dropout = False

    def dummy_inputs(self, input_shape):
        return {"input_ids": jnp.ones((1, 3))}

    def __call__(self, values, **options):
        return self.run({"input_ids": values}, **options)


@pytest.mark.parametrize("save_format", ["safetensors", "msgpack"])
def test_statistics_of_a_module_of_ones_own(save_format, tmp_path: Path):
    model, values = OwnModel(transformers.PretrainedConfig()), np.random.default_rng(0).normal(size=(8, 3))
    _, updates = model(values, train=True)
    model.params = {**model.params, **updates}
    assert np.abs(np.asarray(model.params["batch_stats"]["BatchNorm_0"]["mean"])).max() > 1e-4
    model.save_pretrained(tmp_path, save_format=save_format)
    assert_trees_equal(OwnModel.from_pretrained(tmp_path).params, model.params)
