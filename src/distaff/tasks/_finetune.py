"""The course of a recipe that fine-tunes: training, evaluation over the whole set, the best step, predictions, folder.

A recipe says what is its own in a `Recipe`, whose `prepare` makes a `Finetuning` of the flags; the rest is here once.
Figures are computed on the host from what the model says of every row, never as means of batches: they do not depend on
the size of batches or the number of devices.
"""

import csv
import io
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from distaff.core.errors import UsageError, listed
from distaff.core.processes import is_first
from distaff.core.tree import Tree, flatten, unflatten
from distaff.data.batches import Batches
from distaff.tasks import _folder, _placement
from distaff.tasks import _planned as planned
from distaff.tasks import _recipe as recipes
from distaff.tasks._finetune_flags import FinetuneFlags
from distaff.tasks._flags import check_epsilon
from distaff.train import FitResult, Selection, collect, fit, make_optimizer

logger = logging.getLogger("distaff")

# What a model said of each row: one array a row under each name.
Outputs = dict[str, list[Any]]


@dataclass(frozen=True)
class HeldOut:
    """Rows that are not learnt from.

    batches: of them, each row once (`shuffle=False`). rows: whatever a recipe's figures and predictions need besides.
    """

    batches: Batches
    rows: Any = None


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """What a recipe made of its flags. Functions are made once, for each new one is compiled anew.

    saved: the tokenizer or processor that is saved beside the model.
    loss_fn: of `fit`; with a `carried` argument where the model has statistics.
    forward: `(params, batch) -> {name: [rows, ...]}`, with `carried` as a third argument likewise.
    figures: `(outputs, held_out) -> values`, "loss" among them; one that is not defined is nan.
    metric: which of them a run is chosen by unless a flag says otherwise. metrics: the names of all of them.
    evaluations: by what is put behind the names of their figures; the first, "", is evaluated while training too.
    tests: likewise, the rows to predict for. predict: `(outputs, held_out) -> rows of the file of predictions`.
    write: more files that predictions are written to: `(folder, suffix, outputs, held_out)`; write_evaluation: those
    that the last evaluation is.
    labelled: tells whether a test set has what figures are computed with.
    """

    model: Any
    saved: Any
    loss_fn: Callable[..., Any]
    forward: Callable[..., Any]
    figures: Callable[[Outputs, HeldOut], dict[str, float]]
    metric: str
    metrics: tuple[str, ...]
    train: Batches | None
    predict: Callable[[Outputs, HeldOut], Iterable[Mapping[str, Any]]]
    evaluations: dict[str, HeldOut] = field(default_factory=dict)
    tests: dict[str, HeldOut] = field(default_factory=dict)
    write: Callable[[Path, str, Outputs, HeldOut], None] | None = None
    write_evaluation: Callable[[Path, str, Outputs, HeldOut], None] | None = None
    labelled: Callable[[HeldOut], bool] = lambda held_out: False
    tokens: Callable[[Any], int] | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe is called, the task of its model card, and how its flags become a `Finetuning`.

    prepare: `(flags, (rows of a training batch, rows of an evaluation batch)) -> Finetuning`. It heeds `do_train`,
    `do_eval` and `do_predict`.
    """

    name: str
    task: str
    prepare: Callable[[Any, tuple[int, int]], Finetuning]


def train(recipe: Recipe, flags: FinetuneFlags) -> int:
    """Train and evaluate, write the folder, predict where asked, and return the exit code."""
    if not flags.do_train:
        return evaluate_only(recipe, flags)
    flags.check()
    flags.check_training()
    flags.check_selection()
    check_epsilon(flags, flags)
    folder = _folder.check_folder(flags)
    mesh = recipes.mesh_of(flags)
    sizes = recipes.rows_a_step(flags, mesh)
    tuning = recipe.prepare(flags, sizes)
    result = _fit(recipe, flags, tuning, mesh, folder, sizes)
    if result.interrupted:
        logger.warning("Stopped at step %d; go on with --resume_from_checkpoint.", result.step)
        return 128 + result.interrupted
    params, carried = result.params, result.state.carried
    metrics = _measured(result, folder)
    # What is written of an evaluation is not in the log.
    measured = "eval_loss" in metrics and tuning.write_evaluation is None
    for name, held_out in tuning.evaluations.items():
        if name or not measured:
            metrics |= figures(tuning, held_out, params, carried, mesh, f"eval_{{}}{name}", folder)
    predicted = predict(flags, tuning, params, carried, mesh, folder)
    recipes.finish(
        folder,
        flags,
        model=tuning.model,
        params=_whole(tuning.model, params, carried),
        tokenizer=tuning.saved,
        task=recipe.task,
        metrics=metrics,
        step=result.step,
        shown=tuning.metrics,
    )
    if is_first():
        _folder.write_results(folder, {"predict": predicted}, add=True)
    return 0


def _measured(result: FitResult, folder: Path) -> dict[str, float]:
    """Return the figures of a run: where the best step is taken, nothing of another step's evaluation."""
    metrics, best = recipes.measured(result, folder), result.best
    if best is None or not best.selection.reload:
        return metrics
    name = best.selection.metric.removeprefix("eval_")
    if best.step is None:
        logger.warning("No step is the best by %s: the parameters of the last one are taken.", name)
        return metrics
    logger.info("The parameters of step %d are taken, the best by %s.", best.step, name)
    trained = {name: value for name, value in metrics.items() if not name.startswith("eval_")}
    return {**trained, **best.metrics, "best_step": best.step}


def _fit(
    recipe: Recipe, flags: FinetuneFlags, tuning: Finetuning, mesh: Mesh, folder: Path, sizes: tuple[int, int]
) -> FitResult:
    """Train with all that the flags ask for."""
    assert tuning.train is not None
    carried = planned.parts(tuning.model.params)[1]
    trained = trained_mask(planned.parts(tuning.model.params_shape_tree)[0], flags.freeze)
    epoch = tuning.train.steps_per_epoch
    steps = recipes.count_steps(flags, epoch)
    chosen = selection(flags, tuning)
    plan = recipes.Plan(*sizes, steps)
    plan.log(flags, mesh)
    recipes.log_start(flags, flags)
    masks = {"decay_mask": tuning.model.decay_mask(), "matrices": tuning.model.matrices()}
    tx, schedule = make_optimizer(
        flags.optimizer_config(),
        total_steps=steps,
        trained=trained,
        **{name: planned.parts(mask)[0] for name, mask in masks.items()},
    )
    first = next(iter(tuning.evaluations.values()), None)
    _placement.show(flags, tuning.model, tx, mesh)
    return fit(
        tuning.loss_fn if trained is None else partial(_without_frozen, tuning.loss_fn, trained),
        params=lambda: planned.parts(tuning.model.hand_over())[0],
        filled=tuning.model.filled_shapes(),
        carried=carried,
        tx=tx,
        schedule=schedule,
        batches=tuning.train,
        config=flags.loop(total_steps=steps, steps_per_epoch=epoch, eval_batches=0, selection=chosen),
        mesh=mesh,
        tokens_per_batch=tuning.tokens,
        score=None if first is None else Scorer(tuning, first, mesh, _metric(flags, tuning)),
        on_start=partial(_folder.begin, folder, flags, recipe.name),
    )


def evaluate_only(recipe: Recipe, flags: FinetuneFlags) -> int:
    """Evaluate a checkpoint, predict where asked, print the figures and, with --output_dir, write them."""
    flags.check()
    flags.do_train = False
    if flags.model_name_or_path is None:
        raise UsageError("There is nothing to evaluate: give --model_name_or_path.")
    if flags.do_predict and not flags.output_dir:
        raise UsageError("Predictions go into a folder: name it with --output_dir.")
    flags.do_eval = flags.do_eval and (flags.has_evaluation() or not flags.do_predict)
    if not (flags.do_eval or flags.do_predict):
        raise UsageError("Without training and evaluation nothing is left to do: leave --do_eval False out.")
    folder = _folder.output_folder(flags.output_dir) if flags.output_dir is not None else None
    mesh = recipes.mesh_of(flags)
    tuning = recipe.prepare(flags, recipes.rows_a_step(flags, mesh))
    params, carried = planned.parts(tuning.model.params)
    evaluated: dict[str, float] = {}
    for name, held_out in tuning.evaluations.items():
        evaluated |= figures(tuning, held_out, params, carried, mesh, f"eval_{{}}{name}", folder)
    predicted = {} if folder is None else predict(flags, tuning, params, carried, mesh, folder)
    if not is_first():
        return 0
    if folder is not None:
        parts = {"eval": evaluated, "predict": predicted}
        _folder.write_results(folder, {name: values for name, values in parts.items() if values}, add=True)
    for name, value in (evaluated | predicted).items():
        print(f"{name} = {value:.6g}" if math.isfinite(value) else f"{name} = null")
    return 0


def planned_step(
    flags: FinetuneFlags, model: Any, loss_fn: Callable[..., Any], batch: dict[str, jax.ShapeDtypeStruct]
) -> planned.Planned:
    """Return the step of a training that begins with the shapes of `model`, with what is frozen."""
    trained = trained_mask(planned.parts(model.params_shape_tree)[0], flags.freeze)
    if trained is not None:
        loss_fn = partial(_without_frozen, loss_fn, trained)
    return planned.Planned(model=model, loss_fn=loss_fn, batch=batch, trained=trained)


# Evaluation and predictions.


@dataclass(frozen=True)
class Scorer:
    """The figures of a set by parameters, as `fit` asks for them; `metric` is one of them, nan if not defined."""

    tuning: Finetuning
    held_out: HeldOut
    mesh: Mesh
    metric: str

    def __call__(self, params: Tree, carried: Tree = None) -> dict[str, float]:
        """Return the figures."""
        # A set may have nothing to measure one by: no span of a type, no question with an answer.
        found = figures(self.tuning, self.held_out, params, carried, self.mesh, "{}")
        return found if self.metric in found else found | {self.metric: math.nan}


def figures(
    tuning: Finetuning,
    held_out: HeldOut,
    params: Tree,
    carried: Tree,
    mesh: Mesh,
    name: str,
    folder: Path | None = None,
) -> dict[str, float]:
    """Return the figures of a set; `name` has braces where that of a figure stands. `folder`: to write to, if any."""
    outputs = collect(tuning.forward, params=params, batches=held_out.batches, mesh=mesh, carried=carried)
    if folder is not None and tuning.write_evaluation is not None and is_first():
        tuning.write_evaluation(folder, name.rpartition("}")[2], outputs, held_out)
    return {name.format(key): value for key, value in tuning.figures(outputs, held_out).items()}


def predict(
    flags: FinetuneFlags, tuning: Finetuning, params: Tree, carried: Tree, mesh: Mesh, folder: Path
) -> dict[str, float]:
    """Write the predictions of each test set, and return figures of those that have answers."""
    values: dict[str, float] = {}
    for suffix, held_out in tuning.tests.items():
        outputs = collect(tuning.forward, params=params, batches=held_out.batches, mesh=mesh, carried=carried)
        rows = list(tuning.predict(outputs, held_out))
        values[f"predict_samples{suffix}"] = len(rows)
        if tuning.labelled(held_out):
            found = tuning.figures(outputs, held_out)
            values |= {f"predict_{name}{suffix}": value for name, value in found.items()}
        if is_first():
            write_predictions(folder / f"{_folder.PREDICT}{suffix}.{flags.predictions_format}", rows)
            if tuning.write is not None:
                tuning.write(folder, suffix, outputs, held_out)
    return values


def write_predictions(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line a row, as CSV with a header or as JSONL."""
    rows = list(rows)
    text = io.StringIO(newline="")
    if path.suffix == ".csv":
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    _folder.replace_text(path, text.getvalue())


# The best step.


def _metric(flags: FinetuneFlags, tuning: Finetuning) -> str:
    return (flags.metric_for_best_model or tuning.metric).removeprefix("eval_")


def selection(flags: FinetuneFlags, tuning: Finetuning) -> Selection | None:
    """Return by what evaluations are compared, None where that changes nothing."""
    if flags.early_stopping_patience is None and not flags.load_best_model_at_end:
        return None
    if not tuning.evaluations:
        raise UsageError("Without an evaluation no step is the best: leave --do_eval False out.")
    metric = _metric(flags, tuning)
    if metric not in tuning.metrics:
        raise UsageError(f"--metric_for_best_model '{metric}' is not measured: choose of {listed(tuning.metrics)}.")
    greater = flags.greater_is_better
    return Selection(
        metric=f"eval_{metric}",
        greater_is_better=not metric.endswith(("loss", "mse")) if greater is None else greater,
        patience=flags.early_stopping_patience,
        threshold=flags.early_stopping_threshold,
        reload=flags.load_best_model_at_end,
    )


# Parameters.


def check_head(flags: Any, config: Any, known: Sequence[str], names: Sequence[str], *, head: str) -> bool:
    """Tell whether the checkpoint of `config` has a `head` ("ForImageClassification") that learns `names`.

    Raises `UsageError` where it tells another number of labels apart (it knows `known`) and may not be made anew.
    """
    there = flags.model_name_or_path is not None and any(head in name for name in config.architectures or ())
    if there and len(known) != len(names) and not flags.ignore_mismatched_sizes:
        raise UsageError(
            f"The checkpoint tells {len(known)} labels apart ({listed(known, 3)}), and the data have {len(names)} "
            f"({listed(names, 3)}): begin with a new head by --ignore_mismatched_sizes."
        )
    return there and len(known) == len(names)


def trained_mask(params: Tree, frozen: list[str]) -> Tree | None:
    """Return booleans, shaped as `params`, that are False below the `frozen` modules; None where there are none.

    A module is called by its path or the end of one, with "/" or ".": "bert/encoder/0" or "encoder.0".
    """
    if not frozen:
        return None
    paths = list(flatten(params))
    stays: set[str] = set()
    for name in frozen:
        inner = f"/{name.strip('/.').replace('.', '/')}/"
        found = [path for path in paths if inner in f"/{path}/"]
        if not found:
            modules = sorted({"/".join(path.split("/")[:2]) for path in paths})
            raise UsageError(f"--freeze '{name}' is no module of the model: it has {listed(modules)}.")
        stays |= set(found)
    if len(stays) == len(paths):
        raise UsageError("--freeze leaves no parameter to train: name fewer modules.")
    logger.info("%d of %d parameters are frozen.", len(stays), len(paths))
    return unflatten({path: path not in stays for path in paths})


def _without_frozen(loss_fn: Callable[..., Any], trained: Tree, params: Tree, *others: Any) -> Any:
    """Call `loss_fn` with frozen parameters as constants, so that nothing is computed for them backwards."""
    params = jax.tree.map(lambda learns, leaf: leaf if learns else jax.lax.stop_gradient(leaf), trained, params)
    return loss_fn(params, *others)


def _whole(model: Any, params: Tree, carried: Tree) -> Tree:
    """Return `params` as the model takes them."""
    return params if carried is None else {"params": params, **carried}
