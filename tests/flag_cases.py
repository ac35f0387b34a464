"""What a recipe hands to the layers below for its flags, without training: recorded where it is handed over."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import jax
import numpy as np
import pytest

from distaff.cli import COMMANDS, main
from distaff.pretrained import FlaxPreTrainedModel
from distaff.train.loop import FitResult

# Modules that call `fit` and `evaluate`, and those that ask for checkpoints by name.
WIRING = ("_text", "_seq2seq", "_finetune")
RESOLVING = ("distaff.tasks._recipe", "distaff.tasks._images", "distaff.tasks.electra", "distaff.pretrained")


def digest(tree: Any) -> str:
    """A short word for the arrays of a tree with their shapes and dtypes."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        found.update(f"{path}{array.shape}{array.dtype}".encode() + array.tobytes())
    return found.hexdigest()


class HandOver:
    """Stands in for `fit` and `evaluate` and for what reaches out, and keeps what they were given.

    What costs time, such as tracing the loss, is done when it is asked for by `of`.
    """

    def __init__(self):
        self.seen: dict[str, Any] = {"called": []}
        self.later: dict[str, Any] = {}
        self.evaluating = False

    def fit(self, loss_fn, *, params, batches, config, eval_batches=None, schedule, score=None, on_start, **others):
        self.seen["called"].append("fit")
        self.seen["loop"] = dataclasses.asdict(config)
        assert (others["tx"], schedule) == self.optimizer
        carried, params = others.get("carried"), params() if callable(params) else params
        self.keep(loss_fn, params, batches, jax.random.key(0), *(() if carried is None else (carried,)))
        self.later["train"] = lambda: [digest(self.batch(step)) for step in range(3)]
        self.later["rows"] = lambda: len(jax.tree.leaves(self.batch(0))[0])
        self.keep_evaluation(eval_batches, config.eval_steps)
        on_start()
        if score is not None:
            score(params, *(() if carried is None else (carried,)))
        evaluates = eval_batches is not None or score is not None
        metrics = {"loss": 1.0, **({"eval_loss": 1.0} if evaluates else {})}
        return FitResult(SimpleNamespace(evaluated=params, carried=carried), config.total_steps, metrics, None, {})

    def evaluate(self, loss_fn, *, params, batches, steps, mesh):
        self.seen["called"].append("evaluate")
        if self.seen["called"] == ["evaluate"]:
            self.keep(loss_fn, params, batches, None)
            self.keep_evaluation(batches, steps)
        return {"loss": 1.0, "generator_loss": 1.0, "discriminator_loss": 1.0}

    def figures(self, inner):
        """`inner` of fine-tuning, whose rows are those of an evaluation."""

        def figures(*words):
            self.evaluating = True
            try:
                return inner(*words)
            finally:
                self.evaluating = False

        return figures

    def collect(self, forward, *, params, batches, mesh, carried=None):
        """Zeros in the shapes of what a model would say of each row."""
        rest = () if carried is None else (carried,)
        if not self.seen["called"]:
            self.keep(lambda params, batch, key, *rest: forward(params, batch, *rest), params, batches, None, *rest)
        if self.evaluating:
            self.keep_evaluation(batches, batches.steps_per_epoch)
        else:
            rows = [digest(batches(step)) for step in range(batches.steps_per_epoch)]
            self.seen.setdefault("generated", []).append(rows)
        self.seen["called"].append("evaluated" if self.evaluating else "predicted")
        said: dict[str, list] = {}
        for step in range(batches.steps_per_epoch):
            numbers, weights = batches.indices(step)
            for name, rows in jax.eval_shape(forward, params, batches(step), *rest).items():
                places = said.setdefault(name, [None] * batches.rows)
                for number in numbers[weights > 0]:
                    places[number] = np.zeros(rows.shape[1:], rows.dtype)
        return said

    def keep(self, loss_fn, params, batches, key, *carried):
        self.batch = functools.cache(batches)  # a stream goes forward only
        self.later["params"] = lambda: digest(params)
        self.later["program"] = lambda: str(jax.make_jaxpr(loss_fn)(params, self.batch(0), key, *carried))

    def keep_evaluation(self, batches, steps):
        if batches is not None:
            self.later["eval"] = lambda: [digest(batches(step)) for step in range(steps)]
            self.later["eval_rows"] = lambda: len(jax.tree.leaves(batches(0))[0])

    def make_optimizer(self, inner):
        def make(config, **others):
            self.seen["optimizer"] = dataclasses.asdict(config)
            self.seen["trained"] = others.get("trained")
            assert any(jax.tree.leaves(others["matrices"])) or config.name != "muon"
            self.optimizer = inner(config, **others)
            return self.optimizer

        return make

    def generate_texts(self, side, params, batches):
        rows = [digest(batches(step)) for step in range(batches.steps_per_epoch)]
        self.seen.setdefault("generated", []).append((side.generation, rows))
        return ["text"] * batches.rows

    def recording(self, name, inner):
        """`inner`, of which each call's arguments are kept as `name`."""

        def call(*words, **options):
            self.seen.setdefault(name, []).append((words, options))
            return inner(*words, **options)

        return call

    def map(self, inner):
        def run(dataset, *words, num_proc=None, **options):
            self.seen.setdefault("tokenising", []).append((num_proc, options.get("load_from_cache_file")))
            return inner(dataset, *words, **options)  # in this process: others take seconds to start

        return run

    def of(self, name: str) -> Any:
        """What was seen of `name`, None where that did not come to pass."""
        if name in self.later:
            self.seen[name] = self.later.pop(name)()
        return self.seen.get(name)


SHAPES: dict[Any, Any] = {}


def shapes_once(inner):
    """`inner`, the trace of a model for its shapes, made once a config: most of what a hand-over takes."""

    def shapes(model):
        fields = (model.param_dtype, model.dtype, model.module.scan_layers, model.input_shape)
        key = (type(model), model.config.to_json_string(use_diff=False), *fields)
        if key not in SHAPES:
            SHAPES[key] = inner(model)
        return SHAPES[key]

    return shapes


@contextlib.contextmanager
def patched(record: HandOver):
    """The layers below are recorded instead of run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in WIRING:
            module = importlib.import_module(f"distaff.tasks.{name}")
            patch.setattr(module, "fit", record.fit)
            patch.setattr(module, "evaluate", record.evaluate, raising=False)
            patch.setattr(module, "make_optimizer", record.make_optimizer(module.make_optimizer))
        patch.setattr("distaff.tasks._seq2seq.generate_texts", record.generate_texts)
        finetune = importlib.import_module("distaff.tasks._finetune")
        patch.setattr(finetune, "figures", record.figures(finetune.figures))
        patch.setattr(finetune, "collect", record.collect)
        patch.setattr("distaff.tasks._recipe.push_folder", record.recording("published", lambda *w, **o: "address"))
        for name in RESOLVING:
            module = importlib.import_module(name)
            patch.setattr(module, "resolve", record.recording("names", module.resolve))
        patch.setattr(FlaxPreTrainedModel, "_shapes", shapes_once(FlaxPreTrainedModel._shapes))
        patch.setattr("distaff.data.image.ThreadPoolExecutor", record.recording("threads", ThreadPoolExecutor))
        patch.setattr(datasets, "load_dataset", record.recording("datasets", datasets.load_dataset))
        patch.setattr(datasets.Dataset, "map", record.map(datasets.Dataset.map))
        yield


def hand_over(words: list[str], capsys, folder: Path) -> HandOver:
    """Run a command that writes below `folder`, and tell what it handed over, printed and wrote."""
    record = HandOver()
    with patched(record):
        record.seen["code"] = main(words)
    printed = capsys.readouterr()
    record.seen["printed"] = printed.out
    record.seen["error"] = " ".join(line for line in printed.err.splitlines() if line.startswith("distaff: "))
    record.seen["answers"] = [path.read_text() for path in sorted(folder.glob("*/*predictions.json"))]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    record.seen["cache"] = [name for name in names if name.startswith("cache/")]
    record.seen["files"] = [name for name in names if not name.startswith("cache")]
    return record


def flags_of(name: tuple[str, ...]) -> set[str]:
    """The flags that a command takes, from its dataclass and from what its parser says of them."""
    command = COMMANDS[name]
    cls = getattr(importlib.import_module(command.module), command.flags)
    return {field.name for field in dataclasses.fields(cls)} - training_only(name)


def training_only(name: tuple[str, ...]) -> set[str]:
    """Flags of the dataclass that an evaluation refuses."""
    from distaff.tasks._flags import TRAINING_ONLY

    return set(TRAINING_ONLY) if name[0] == "eval" else set()
