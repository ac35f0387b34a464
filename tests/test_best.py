"""Evaluations that are compared: the best step is kept and reloaded, a run stops for want of a better one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from distaff.core.errors import UsageError
from distaff.core.mesh import make_mesh
from distaff.train import LoopConfig, OptimizerConfig, Selection, fit, make_optimizer
from distaff.train.checkpoint import complete_steps

# The figure after each step: best after step 3, and no better one later.
FIGURES = [0.1, 0.5, 0.9, 0.4, 0.4, 0.9, 0.3, 0.2]


def loss_fn(params, batch, rng):
    return {"loss": (jnp.sum((params["w"][None] - batch["x"]) ** 2), jnp.float32(4))}


def batches(step):
    return {"x": np.full((4, 2), step, np.float32)}


def run(folder, steps=8, *, figures=FIGURES, **settings):
    """A run whose parameters tell the step: each adds one to the count that stands in `w`."""
    selection = {"metric": "eval_accuracy", **settings.pop("selection", {})}
    seen = []

    def score(params):
        seen.append(np.asarray(params["w"]))
        return {"accuracy": figures[round(float(seen[-1][0])) - 1], "other": 7.0}

    add_one = optax.GradientTransformation(
        lambda params: {"unused": jnp.zeros(())},
        lambda grads, state, params: (jax.tree.map(jnp.ones_like, grads), state),
    )
    config = LoopConfig(
        total_steps=steps,
        output_dir=folder,
        eval_every=1,
        save_every=settings.pop("save_every", 100),
        progress=False,
        report_to=(),
        selection=Selection(**selection),
        **settings,
    )
    result = fit(
        loss_fn,
        params={"w": np.zeros(2, np.float32)},
        tx=add_one,
        batches=batches,
        score=score,
        config=config,
        mesh=make_mesh(devices=jax.devices()[:1]),
    )
    return result, len(seen)


def test_best_step_is_kept_and_reloaded(tmp_path):
    result, _ = run(tmp_path, save_total_limit=1, save_every=1)
    assert result.best.step == 3
    assert result.best.metrics == {"eval_accuracy": 0.9, "eval_other": 7.0}
    assert np.asarray(result.state.params["w"]).tolist() == [3, 3]
    assert complete_steps(tmp_path / "checkpoints") == [3, 8]


def test_without_reload_the_last_step_stays(tmp_path):
    result, _ = run(tmp_path, selection={"reload": False})
    assert (result.best.step, float(result.state.params["w"][0])) == (3, 8)
    assert complete_steps(tmp_path / "checkpoints") == [8]


@pytest.mark.parametrize(("threshold", "patience", "stopped"), [(0.0, 2, 5), (0.0, 4, 7), (0.45, 1, 2)])
def test_patience_ends_a_run(tmp_path, threshold, patience, stopped):
    """As Transformers counts: evaluations in a row that do not beat the best by more than the threshold."""
    result, evaluations = run(tmp_path, selection={"patience": patience, "threshold": threshold})
    assert result.step == evaluations == stopped
    assert result.best.step == min(stopped, 3)


def test_less_can_be_better_and_nan_never_is(tmp_path):
    result, _ = run(
        tmp_path, figures=[float("nan"), 3.0, 2.0, float("nan")], steps=4, selection={"greater_is_better": False}
    )
    assert result.best.step == 3


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_resumed_run_chooses_and_stops_as_one_at_once(tmp_path, stop):
    """The best, what was waited, and the kept checkpoint travel in the checkpoint."""
    selection = {"patience": 3}
    whole, _ = run(tmp_path / "whole", selection=selection)
    run(tmp_path / "parts", stop, selection=selection, save_total_limit=1)
    resumed, _ = run(tmp_path / "parts", selection=selection, resume="newest", save_total_limit=1)
    assert (resumed.step, resumed.best) == (whole.step, whole.best) == (6, whole.best)
    assert np.asarray(resumed.state.params["w"]).tolist() == [3, 3]


def test_resume_into_another_folder_finds_the_best(tmp_path):
    run(tmp_path / "first", 4)
    result, _ = run(tmp_path / "second", resume=tmp_path / "first")
    assert (result.best.step, float(result.state.params["w"][0])) == (3, 3)


def test_a_run_whose_patience_ended_does_not_go_on(tmp_path):
    run(tmp_path, selection={"patience": 2})
    result, evaluations = run(tmp_path, selection={"patience": 2}, resume="newest")
    assert (result.step, evaluations) == (5, 0)


def test_a_best_step_whose_checkpoint_is_gone_is_no_choice(tmp_path, caplog):
    """A run that did not reload has not kept it; the next one takes the best of its own steps, and says so."""
    run(tmp_path, 4, selection={"reload": False})
    result, _ = run(tmp_path, resume="newest", selection={"patience": 2})
    assert "The checkpoint of step 3, the best before, is gone: the best from here on is taken." in caplog.text
    assert (result.step, result.best.step, float(result.state.params["w"][0])) == (8, 6, 6)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match="no metric 'eval_f1' to choose by: an evaluation has eval_accuracy, eval_other"
    ):
        run(tmp_path / "a", selection={"metric": "eval_f1"})
    with pytest.raises(UsageError, match="output_dir"):
        LoopConfig(total_steps=1, selection=Selection(metric="eval_loss"))
    with pytest.raises(UsageError, match="patience must be at least 1"):
        Selection(metric="eval_loss", patience=0)


def test_frozen_parameters_have_no_state_and_do_not_change(tmp_path):
    """Neither gradients nor decay move them, the norm is that of the others, and a resume finds all that was saved."""
    params = {"a": {"w": np.full(2, 3.0, np.float32)}, "b": {"w": np.full(2, 3.0, np.float32)}}
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0)
    tx, _ = make_optimizer(config, total_steps=4, trained={"a": {"w": True}, "b": {"w": False}})
    alone, _ = make_optimizer(config, total_steps=4)

    def loss(params, batch, rng):
        return {"loss": (sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)), jnp.float32(1))}

    def train(params, tx, steps, **settings):
        config = LoopConfig(total_steps=steps, progress=False, report_to=(), **settings)
        mesh = make_mesh(devices=jax.devices()[:1])
        return fit(loss, params=params, tx=tx, batches=batches, config=config, mesh=mesh).state

    state = train(params, tx, 4)
    assert np.asarray(state.params["b"]["w"]).tolist() == [3, 3]
    np.testing.assert_array_equal(state.params["a"]["w"], train({"a": params["a"]}, alone, 4).params["a"]["w"])
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) < 2 * 4
    train(params, tx, 2, output_dir=tmp_path)
    resumed = train(params, tx, 4, output_dir=tmp_path, resume="newest")
    np.testing.assert_array_equal(resumed.params["a"]["w"], state.params["a"]["w"])
