"""Every setting of the loop and of the optimizer changes what a run does; test_flags.py shows that flags reach them."""

import json
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from distaff.core.errors import DistaffError
from distaff.core.mesh import make_mesh
from distaff.train import LoopConfig, OptimizerConfig, Selection, fit, make_optimizer

LOOP = {
    "total_steps": (5, {}),
    "output_dir": ("other", {}),
    "accumulation": (2, {}),
    "seed": (1, {}),
    "log_every": (1, {}),
    "eval_every": (2, {}),
    "eval_steps": (2, {}),
    "save_every": (1, {}),
    "save_total_limit": (1, {"save_every": 1}),
    "resume": ("newest", {"after": 2}),
    "overwrite": (True, {"after": 2}),
    "report_to": (("tensorboard",), {}),
    "steps_per_epoch": (2.0, {}),
    "debug_nans": (True, {"poison": 2}),
    "ema_decay": (0.5, {}),
    "progress": (True, {}),
    "selection": (Selection(metric="eval_loss", patience=1), {"eval_every": 1}),
}
OPTIMIZER = {
    "optimizer": "lion",
    "learning_rate": 0.2,
    "weight_decay": 0.5,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 0.5,
    "sgd_momentum": 0.5,
    "moment_dtype": "bfloat16",
    "adafactor": True,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.1,
}


def loss_fn(params, batch, rng):
    noise = 0.0 if rng is None else jax.random.normal(rng)
    errors = jnp.square(batch["x"] * params["w"] + noise) + jnp.sqrt(batch["good"])
    return {"loss": (errors.sum(), jnp.float32(errors.size))}


def outcome(folder, capsys, *, after=0, poison=0, **settings):
    """What a run of four steps leaves: its parameters, files, log, what it printed and the error that ended it."""

    def batches(step):
        x = np.random.default_rng(step).normal(size=4).astype(np.float32)
        good = -np.ones(4) if poison and step == poison else np.ones(4)
        return {"x": x, "good": good.astype(np.float32)}

    def train(**changes):
        given = {"total_steps": 4, "output_dir": folder / "out", "log_every": 2, "report_to": (), "progress": False}
        given |= {"eval_steps": 1} | settings | changes
        given["output_dir"] = folder / given["output_dir"]
        tx, schedule = make_optimizer(OptimizerConfig(learning_rate=0.1), total_steps=10)
        return fit(
            loss_fn,
            params={"w": np.ones((), np.float32)},
            tx=tx,
            schedule=schedule,
            batches=batches,
            eval_batches=batches,
            config=LoopConfig(**given),
            mesh=make_mesh(devices=jax.devices()[:1]),
        )

    if after:
        train(total_steps=after, resume=None, overwrite=False)
    capsys.readouterr()
    try:
        result = float(train().params["w"])
    except DistaffError as error:
        result = str(error).replace(str(folder), "")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name)
    log = [
        sorted(
            (name, value) for name, value in json.loads(line).items() if "second" not in name and "memory" not in name
        )
        for path in sorted(folder.rglob("metrics.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return result, names, log, bool(capsys.readouterr().err)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return {}


def test_settings_are_all_here():
    assert LOOP.keys() == {field.name for field in fields(LoopConfig)}
    assert OPTIMIZER.keys() == {field.name for field in fields(OptimizerConfig)}


@pytest.mark.parametrize("name", LOOP)
def test_a_setting_of_the_loop_changes_what_it_does(name, tmp_path, capsys, plain):
    value, beside = LOOP[name]
    key = str(beside)
    if key not in plain:
        plain[key] = outcome(tmp_path / "plain", capsys, **beside)
    assert outcome(tmp_path / "changed", capsys, **beside, **{name: value}) != plain[key]


@pytest.mark.parametrize("name", OPTIMIZER)
def test_a_setting_of_the_optimizer_changes_the_update(name):
    def trained(**changes):
        beside = {"optimizer": "sgd"} if name == "sgd_momentum" else {}
        tx, _ = make_optimizer(OptimizerConfig(**{"learning_rate": 0.1, **beside, **changes}), total_steps=10)
        params = {"w": np.full((2, 2), 2.0, np.float32)}
        state = tx.init(params)
        for step in range(3):
            grads = {"w": np.cos(params["w"] + step).astype(np.float32)}
            change, state = tx.update(grads, state, params)
            params = jax.device_get(optax.apply_updates(params, change))
        return params["w"]

    assert not np.allclose(trained(**{name: OPTIMIZER[name]}), trained(), rtol=1e-5)
