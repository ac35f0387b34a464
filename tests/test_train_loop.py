"""The loop: resume bit for bit, logs, signals, a kill at any moment, streams, evaluation, errors."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kill_target
from distaff.core.errors import CheckpointError, DataError, DistaffError, MissingExtraError, UsageError
from distaff.core.mesh import make_mesh
from distaff.train import LoopConfig, OptimizerConfig, fit, make_optimizer, perplexity
from distaff.train.checkpoint import complete_steps
from distaff.train.log import Terminal
from distaff.train.prefetch import Prefetch

TIMINGS = {"tokens_per_second", "examples_per_second", "step_seconds", "peak_memory_mb"}
ROWS = 16


def make_params():
    rng = np.random.default_rng(0)
    return {
        "in": {"kernel": rng.normal(size=(4, 8)).astype(np.float32), "bias": np.zeros(8, np.float32)},
        "out": {"kernel": rng.normal(size=(8, 1)).astype(np.float32)},
    }


def loss_fn(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["in"]["kernel"] + params["in"]["bias"][None])
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.8, hidden.shape) / 0.8
    errors = jnp.square((hidden @ params["out"]["kernel"])[:, 0] - batch["y"])
    return {"loss": ((errors * batch["weights"]).sum(), batch["weights"].sum())}


def batches(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1), "weights": rng.integers(0, 4, ROWS).astype(np.float32)}


class Stream:
    """Numbers read one after the other, ROWS at a time: a batch is no function of the step."""

    def __init__(self):
        self.read = 0

    def __call__(self, step):
        self.read += ROWS
        return batches(self.read)

    def state_dict(self):
        return {"read": self.read, "epoch": self.read / 64}

    def load_state_dict(self, state):
        self.read = state["read"]


def run(folder=None, *, steps=10, adafactor=False, data=batches, stop_at=None, **settings):
    """Train; with `stop_at` the process gets SIGTERM while that step is logged."""
    config = OptimizerConfig(learning_rate=0.05, warmup_steps=2, adafactor=adafactor, max_grad_norm=1.0)
    tx, schedule = make_optimizer(config, total_steps=10)
    named = {
        name: settings.pop(name)
        for name in ("mesh", "eval_batches", "tokens_per_batch", "derived", "on_log", "loss")
        if name in settings
    }

    def on_log(step, values):
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    defaults = {"log_every": 1, "progress": False, "report_to": (), "accumulation": 2, "seed": 3}
    return fit(
        named.pop("loss", loss_fn),
        params=make_params(),
        tx=tx,
        schedule=schedule,
        batches=data,
        config=LoopConfig(total_steps=steps, output_dir=folder, **defaults | settings),
        **{"on_log": on_log, "mesh": make_mesh(devices=jax.devices()[:2])} | named,
    )


def lines(folder):
    """The log without what depends on the clock."""
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in found]


def assert_same_state(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("adafactor", "data", "log_every"),
    [(False, lambda: batches, 1), (False, Stream, 3), (True, lambda: batches, 3), (True, Stream, 1)],
    ids=["adamw", "adamw-stream", "adafactor", "adafactor-stream"],
)
def test_stopped_and_resumed_twice_equals_at_once(tmp_path, adafactor, data, log_every):
    settings = {"adafactor": adafactor, "log_every": log_every}
    whole = run(tmp_path / "whole", data=data(), **settings)
    first = run(tmp_path / "parts", data=data(), stop_at=3, **settings)
    assert (first.step, first.interrupted) == (3, signal.SIGTERM)
    second = run(tmp_path / "parts", data=data(), resume="newest", stop_at=6, **settings)
    assert (second.step, second.interrupted) == (6, signal.SIGTERM)
    last = run(tmp_path / "parts", data=data(), resume="newest", **settings)
    assert (last.step, last.interrupted) == (10, None)
    assert_same_state(whole.state, last.state)
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    expected = {1: [*range(1, 11)], 3: [3, 6, 9, 10]}[log_every]
    assert [line["step"] for line in lines(tmp_path / "parts")] == expected


@pytest.mark.parametrize("data", [lambda: batches, Stream], ids=["function", "stream"])
def test_resumed_inside_a_log_window_equals_at_once(tmp_path, data):
    whole = run(tmp_path / "whole", data=data(), log_every=5, save_every=2)
    for step in (2, 4, 6, 8):
        parts = run(
            tmp_path / f"from{step}", data=data(), log_every=5, resume=tmp_path / "whole" / "checkpoints" / str(step)
        )
        assert_same_state(whole.state, parts.state)
        assert lines(tmp_path / f"from{step}") == [line for line in lines(tmp_path / "whole") if line["step"] > step]


def test_resume_on_other_devices(tmp_path):
    whole = run(tmp_path / "whole", save_every=4)
    for devices in (1, 4):
        folder = tmp_path / f"on{devices}"
        mesh = make_mesh(devices=jax.devices()[:devices])
        parts = run(folder, resume=tmp_path / "whole" / "checkpoints" / "4", mesh=mesh)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6),
            whole.state.params,
            parts.state.params,
        )


def test_lines_of_the_run_left_behind_go(tmp_path, caplog):
    whole = run(tmp_path, save_every=2)
    expected = lines(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "los')
    with caplog.at_level(logging.WARNING, "distaff.train"):
        again = run(tmp_path, save_every=2, resume=tmp_path / "checkpoints" / "4")
    assert "checkpoints of later steps (6, 8, 10) are now in" in caplog.text
    assert lines(tmp_path) == expected
    assert_same_state(whole.state, again.state)
    assert complete_steps(tmp_path / "checkpoints") == [2, 4, 6, 8, 10]


def test_a_damaged_newest_checkpoint_costs_only_its_steps(tmp_path):
    whole = run(tmp_path, save_every=2)
    metadata = tmp_path / "checkpoints" / "10" / "params" / "_METADATA"
    metadata.write_bytes(metadata.read_bytes()[:40])
    again = run(tmp_path, save_every=2, resume="newest")
    assert again.step == 10
    assert_same_state(whole.state, again.state)


def test_a_finished_run_resumed_does_nothing(tmp_path):
    whole = run(tmp_path)
    again = run(tmp_path, resume="newest")
    assert again.step == 10
    assert again.compilations == {"train_step": 0, "eval_step": 0}
    assert_same_state(whole.state, again.state)


def test_save_total_limit(tmp_path):
    run(tmp_path, save_every=1, save_total_limit=2)
    assert complete_steps(tmp_path / "checkpoints") == [9, 10]


def test_the_loop_transfers_nothing_implicitly():
    with jax.transfer_guard("disallow"):
        result = run(steps=4, eval_batches=batches, eval_steps=2)
    assert result.step == 4


def test_logged_numbers(tmp_path):
    seen = []
    result = run(
        tmp_path,
        accumulation=1,
        log_every=4,
        eval_batches=lambda index: batches(100 + index),
        eval_steps=3,
        eval_every=5,
        steps_per_epoch=4,
        tokens_per_batch="weights",
        derived=lambda values: {"perplexity": perplexity(values["loss"])},
        on_log=lambda step, values: seen.append((step, sorted(values))),
        report_to=("tensorboard",),
        # A function of its own: what an earlier test compiled would not be compiled again.
        loss=lambda *arguments: loss_fn(*arguments),
    )
    assert result.compilations == {"train_step": 1, "eval_step": 1}
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [4, 5, 8, 10, 10]
    train = ["epoch", "examples_per_second", "grad_norm", "learning_rate", "loss", "peak_memory_mb", "perplexity"]
    train += ["step_seconds", "tokens_per_second"]
    assert seen[0] == (4, train)
    assert seen[1] == (5, ["epoch", "eval_loss", "eval_perplexity"])
    assert found[0]["epoch"] == 1.0
    assert found[0]["perplexity"] == pytest.approx(np.exp(found[0]["loss"]))
    assert found[0]["learning_rate"] == pytest.approx(0.05 * 7 / 8)
    assert found[0]["tokens_per_second"] > found[0]["examples_per_second"] > 0
    assert 0 < found[0]["step_seconds"] < 10
    assert 10 < found[0]["peak_memory_mb"] < 1e6
    assert result.metrics["loss"] == found[3]["loss"]
    assert result.metrics["eval_loss"] == found[4]["eval_loss"]
    assert next(path.name for path in (tmp_path / "runs").iterdir()).startswith("events.out")


def test_the_logged_loss_is_weighted_over_the_window(tmp_path):
    run(tmp_path / "single", accumulation=1)
    run(tmp_path / "window", accumulation=1, log_every=5)
    losses = [line["loss"] for line in lines(tmp_path / "single")][:5]
    weights = [float(batches(step)["weights"].sum()) for step in range(5)]
    assert lines(tmp_path / "window")[0]["loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-6)


def test_changing_shapes_are_counted_and_warned_about(caplog):
    def growing(step):
        return {name: np.concatenate([array] * (1 + step % 2)) for name, array in batches(step).items()}

    with caplog.at_level(logging.WARNING, "distaff.train"):
        result = run(steps=4, data=growing)
    assert result.compilations["train_step"] == 2
    assert caplog.text.count("The train step was compiled 2 times") == 1


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path, poison):
    def bad(step):
        batch = batches(step)
        if step == 4:
            batch["x"][:] = np.nan
        return batch

    def bad_gradient(params, batch, rng):
        sums = loss_fn(params, jax.tree.map(jnp.nan_to_num, batch), rng)
        # The slope of a square root at zero is infinite.
        extra = jnp.sqrt(jnp.where(jnp.isnan(batch["x"]).any(), params["in"]["bias"] * 0, 1.0)).sum()
        return {"loss": (sums["loss"][0] + 0 * extra, sums["loss"][1])}

    with pytest.raises(DistaffError, match="not finite at step 5: lower the learning rate"):
        run(tmp_path, data=bad, save_every=2, log_every=50, loss=loss_fn if poison == "loss" else bad_gradient)
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]


def test_parameters_that_overflow_are_not_saved(tmp_path):
    with pytest.raises(DistaffError, match="parameters are not finite after step 1"):
        fit(
            loss_fn,
            params=make_params(),
            tx=optax.sgd(np.inf),
            batches=batches,
            config=LoopConfig(total_steps=3, output_dir=tmp_path, save_every=1, progress=False, report_to=()),
        )
    assert complete_steps(tmp_path / "checkpoints") == []


def test_debug_nans_names_step_and_operation():
    def bad(params, batch, rng):
        sums = loss_fn(params, batch, rng)
        return {"loss": (sums["loss"][0] + jnp.log(batch["weights"].min() + 0.5), sums["loss"][1])}

    def data(step):
        return batches(step) | ({"weights": np.full(ROWS, -1, np.float32)} if step == 2 else {})

    with pytest.raises(DistaffError, match=r"A NaN stopped step 3: .*\blog\b"):
        run(data=data, loss=bad, debug_nans=True, accumulation=1)


def test_an_error_of_the_batches_reaches_the_caller():
    def broken(step):
        if step == 3:
            raise DataError("Row 7 of the file is no text.")
        return batches(step)

    with pytest.raises(DataError, match="Row 7"):
        run(data=broken)
    assert not [thread for thread in threading.enumerate() if thread.name == "distaff-prefetch"]


@pytest.mark.parametrize("data", [lambda: batches, Stream], ids=["function", "stream"])
def test_an_error_of_the_batches_loses_no_step(tmp_path, caplog, data):
    class Broken(Stream):
        def __call__(self, step):
            if step == 5:
                raise DataError("Line 501 is no JSON.")
            return super().__call__(step)

    def broken(step):
        if step == 5:
            raise DataError("Line 501 is no JSON.")
        return batches(step)

    with pytest.raises(DataError, match="Line 501"):
        run(tmp_path / "parts", data=broken if data() is batches else Broken())
    assert complete_steps(tmp_path / "parts" / "checkpoints") == [5]
    assert "Step 5 is saved: put the data right, then resume." in caplog.text
    parts = run(tmp_path / "parts", data=data(), resume="newest")
    assert_same_state(run(tmp_path / "whole", data=data()).state, parts.state)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_a_log_with_bytes_of_something_else_is_kept_up_to_the_resume(tmp_path):
    run(tmp_path, steps=2)
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'\xff\xfe{"st\n' + log.read_bytes())
    run(tmp_path, steps=3, resume="newest")
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_ctrl_c_saves_and_a_second_one_aborts(tmp_path):
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    result = run(tmp_path / "one", on_log=interrupt)
    assert (result.step, result.interrupted) == (3, signal.SIGINT)
    assert complete_steps(tmp_path / "one" / "checkpoints") == [3]

    def twice(step, values):
        interrupt(step, values)
        interrupt(step, values)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "two", on_log=twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_source_that_hangs_does_not_keep_a_stopped_run(tmp_path):
    release = threading.Event()

    def slow(step):
        if step == 4:
            # By now step 4 was handed over, and step 5 never will be.
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            release.wait(3)
        return batches(step)

    result = run(tmp_path, data=slow)
    release.set()
    assert (result.step, result.interrupted) == (4, signal.SIGTERM)
    assert complete_steps(tmp_path / "checkpoints") == [4]


def test_a_second_ctrl_c_while_leaving_still_ends_the_thread():
    """Python would end it where it is, in the middle of placing a batch, and the process with it."""
    prefetch, joins = Prefetch(batches, start=0, stop=100, place=lambda batch: batch), []

    def join(timeout):
        joins.append(timeout)
        if len(joins) == 1:
            raise KeyboardInterrupt
        threading.Thread.join(prefetch._thread, timeout)

    prefetch._thread.join = join
    with pytest.raises(KeyboardInterrupt), prefetch:
        pass
    assert not prefetch._thread.is_alive()


def test_outside_the_main_thread_it_trains_without_handlers():
    results = []
    thread = threading.Thread(target=lambda: results.append(run(steps=2)))
    thread.start()
    thread.join()
    assert results[0].step == 2


def test_folders_and_resume_flags_that_do_not_fit(tmp_path):
    with pytest.raises(UsageError, match="holds no complete checkpoint to resume from"):
        run(tmp_path / "empty", resume="newest")
    with pytest.raises(UsageError, match="neither is nor holds a complete checkpoint"):
        run(tmp_path / "x", resume=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="needs an output_dir"):
        run(None, resume="newest")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"output_dir .* cannot be written"):
        run(tmp_path / "file" / "out")
    run(tmp_path / "run", steps=2)
    with pytest.raises(UsageError, match="already holds checkpoints up to step 2"):
        run(tmp_path / "run")
    run(tmp_path / "run", steps=1, overwrite=True)
    assert complete_steps(tmp_path / "run" / "checkpoints") == [1]
    assert len(lines(tmp_path / "run")) == 1
    # Of a run elsewhere: the steps, the log and the best of two runs would be one.
    run(tmp_path / "other", steps=3)
    with pytest.raises(UsageError, match="already holds checkpoints up to step 1"):
        run(tmp_path / "run", resume=tmp_path / "other")
    run(tmp_path / "over", steps=1)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        run(tmp_path / "over", resume=tmp_path / "other", overwrite=True, adafactor=True)
    assert complete_steps(tmp_path / "over" / "checkpoints") == [1]  # what is refused overwrites nothing
    run(tmp_path / "over", steps=4, resume=tmp_path / "other", overwrite=True)
    assert complete_steps(tmp_path / "over" / "checkpoints") == [4]
    assert [line["step"] for line in lines(tmp_path / "over")] == [4]
    with pytest.raises(CheckpointError, match="holds no position for these batches"):
        run(tmp_path / "run", data=Stream(), resume="newest")
    with pytest.raises(CheckpointError, match="does not fit this run"):
        run(tmp_path / "run", adafactor=True, resume="newest")
    run(tmp_path / "stream", steps=1, data=Stream())
    with pytest.raises(CheckpointError, match="holds the position of a stream"):
        run(tmp_path / "stream", resume="newest")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "total_steps must be at least 1, not 0"),
        ({"accumulation": 0}, "accumulation must be at least 1"),
        ({"save_total_limit": 0}, "save_total_limit must be at least 1"),
        ({"eval_batches": batches}, "need eval_steps of at least 1"),
        ({"report_to": ("mlflow",)}, "'mlflow' is not known: choose from tensorboard, wandb"),
        ({"accumulation": 3}, "cannot be split into 3 micro-batches over 2 devices"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(UsageError, match=words):
        run(**settings)


def test_wandb_is_refused_where_missing_and_used_where_present(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"report_to 'wandb' needs 'wandb'.*pip install 'distaff\[wandb\]'"):
        run(tmp_path / "without", report_to=("wandb",), loss=None)

    class FakeRun:
        logged, finished = [], False

        def log(self, values, step):
            self.logged.append((step, values["loss"]))

        def finish(self):
            FakeRun.finished = True

    module = ModuleType("wandb")
    module.init = lambda **settings: FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", module)
    run(tmp_path / "with", steps=2, report_to=("wandb",))
    assert FakeRun.logged == [(line["step"], line["loss"]) for line in lines(tmp_path / "with")]
    assert FakeRun.finished


def test_terminal_lines_and_bar(capsys):
    run(steps=3, progress=True)
    text = capsys.readouterr().err
    assert "step 2/3  loss " in text
    assert "left 0:00:00" in text
    assert "done at step 3; compilations: train_step 1, eval_step 0" in text

    class Screen:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            Screen.text += text

        def flush(self):
            pass

    bar = Terminal(total=4, start=1, stream=Screen())
    bar.advance(2)
    bar.write(2, {"loss": 1234.5, "rate": 1e-5})
    bar.close()
    assert "2/4" in Screen.text
    assert "step 2/4  loss 1,234  rate 1.00e-05\n" in Screen.text


@pytest.mark.timeout(900)
def test_killed_at_any_moment(tmp_path, capsys):
    """`kill -9` while every step is saved; DISTAFF_KILLS=10 for the long form."""
    kills = int(os.environ.get("DISTAFF_KILLS", "2"))
    draw = random.Random(1)
    command = [sys.executable, str(Path(__file__).parent / "kill_target.py"), str(tmp_path)]
    reached = [0]
    for _ in range(kills):
        process = subprocess.Popen([*command, "100000"], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if max(complete_steps(tmp_path / "checkpoints"), default=0) >= reached[-1] + 3:
                break
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        process.kill()
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        reached.append(complete_steps(tmp_path / "checkpoints")[-1])
        assert reached[-1] >= reached[-2] + 3
    total = reached[-1] + 3
    done = subprocess.run([*command, str(total)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stderr
    kill_target.main(tmp_path / "whole", total)
    assert done.stdout == capsys.readouterr().out
    assert lines(tmp_path) == lines(tmp_path / "whole")
