"""The course of a recipe that learns from raw text: texts, rows of tokens, training, evaluation, folder.

A recipe says what is its own in a `TextRecipe`; the rest is here and in `_text_data.py` once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from distaff.core.errors import DataError, UsageError
from distaff.core.processes import is_first
from distaff.data.documents import check_joining
from distaff.tasks import _folder, _placement
from distaff.tasks import _planned as planned
from distaff.tasks import _recipe as recipes
from distaff.tasks._flags import check_dtypes, check_epsilon
from distaff.tasks._planned import Planned
from distaff.tasks._text_data import Rows, TextData, make_data
from distaff.train import evaluate, fit, make_optimizer

logger = logging.getLogger("distaff")


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """What a recipe is called, the task of its model card, its model, and its rows.

    model: `(flags, tokenizer) -> model`, as `model_of` with a class. rows: `(flags, tokenizer, model) -> Rows`.
    data: `(flags, tokenizer, rows, *, vocab_size, sizes) -> TextData`, as `make_data`, which joins documents by the eos
    token. saved_tokenizer: the one that is saved, for that of the training.
    """

    name: str
    task: str | None
    model: Callable[[Any, Any], Any]
    rows: Callable[[Any, Any, Any], Rows]
    data: Callable[..., TextData] = make_data
    saved_tokenizer: Callable[[Any], Any] = lambda tokenizer: tokenizer


def train(recipe: TextRecipe, flags: Any) -> int:
    """Train and evaluate, write the folder, and return the exit code."""
    if not flags.do_train:
        return evaluate_only(recipe, flags)
    check_training(flags)
    folder = _folder.check_folder(flags)
    tokenizer, model, rows = prepare(recipe, flags)
    mesh = recipes.mesh_of(flags)
    sizes = recipes.rows_a_step(flags, mesh)
    data = recipe.data(flags, tokenizer, rows, vocab_size=model.config.vocab_size, sizes=sizes)
    steps_per_epoch = getattr(data.train, "steps_per_epoch", None)
    plan = recipes.Plan(*sizes, count_steps(flags, steps_per_epoch))
    plan.log(flags, mesh)
    recipes.log_start(flags, flags)
    tx, schedule = make_optimizer(
        flags.optimizer_config(),
        total_steps=plan.total_steps,
        decay_mask=model.decay_mask(),
        matrices=model.matrices(),
    )
    _placement.show(flags, model, tx, mesh)
    result = fit(
        rows.loss_fn,
        params=model.hand_over,
        filled=model.filled_shapes(),
        tx=tx,
        schedule=schedule,
        batches=data.train,
        eval_batches=data.evaluation,
        config=flags.loop(total_steps=plan.total_steps, steps_per_epoch=steps_per_epoch, eval_batches=data.eval_steps),
        mesh=mesh,
        tokens_per_batch=rows.tokens,
        derived=rows.derived,
        on_start=partial(_folder.begin, folder, flags, recipe.name),
    )
    if result.interrupted:
        logger.warning("Stopped at step %d; go on with --resume_from_checkpoint.", result.step)
        return 128 + result.interrupted
    metrics = recipes.measured(result, folder)
    if not result.metrics and flags.do_eval and "eval_loss" not in metrics:
        metrics |= measure(rows, result.params, data, mesh)
    recipes.finish(
        folder,
        flags,
        model=model,
        params=result.params,
        tokenizer=recipe.saved_tokenizer(tokenizer),
        task=recipe.task,
        metrics=metrics,
        step=result.step,
    )
    return 0


def plan(recipe: TextRecipe, flags: Any, mesh: Mesh) -> Planned:
    """Return the step of a training on `mesh`, as shapes. Without --tokenizer_name none is needed."""
    check_training(flags)
    named = recipes.load_tokenizer(flags, flags.hub_token) if flags.tokenizer_name else None
    with recipes.shapes_only(mesh):
        model = recipe.model(flags, named)
    tokenizer = planned.stand_in(model.config) if named is None else named
    rows = recipe.rows(flags, tokenizer, model)
    made = planned.rows_of(tokenizer, input_ids=rows.block, word_start=rows.block)
    batch = planned.batch_of(rows.collate, made, count=recipes.rows_a_step(flags, mesh)[0], length=rows.block)
    scored = next(name for name in ("masked_positions", "labels", "input_ids") if name in batch)
    return Planned(model=model, loss_fn=rows.loss_fn, batch=batch, scored=batch[scored].shape[1])


def measure(rows: Rows, params, data: TextData, mesh) -> dict[str, float]:
    """Return the figures of an evaluation of `params`, as `eval_...`."""
    assert data.evaluation is not None
    values = evaluate(rows.loss_fn, params=params, batches=data.evaluation, steps=data.eval_steps, mesh=mesh)
    if "loss" not in values:
        raise DataError(f"No token of the evaluation texts is scored, so there is nothing to measure: {rows.unscored}.")
    return {f"eval_{name}": value for name, value in (values | rows.derived(values)).items()}


def evaluate_only(recipe: TextRecipe, flags: Any) -> int:
    """Evaluate a checkpoint, print the metrics and, with --output_dir, write them."""
    check_evaluation(flags)
    flags.do_train = False
    folder = _folder.output_folder(flags.output_dir) if flags.output_dir is not None else None
    tokenizer, model, rows = prepare(recipe, flags)
    mesh = recipes.mesh_of(flags)
    sizes = recipes.rows_a_step(flags, mesh)
    data = recipe.data(flags, tokenizer, rows, vocab_size=model.config.vocab_size, sizes=sizes)
    values = measure(rows, model.params, data, mesh)
    if is_first():
        for name, value in values.items():
            print(f"{name} = {value:.6g}")
        if folder is not None:
            _folder.write_results(folder, {"eval": values}, add=True)
    return 0


def prepare(recipe: TextRecipe, flags: Any) -> tuple[Any, Any, Rows]:
    """Return tokenizer, model and rows, which fit each other."""
    tokenizer = recipes.load_tokenizer(flags, flags.hub_token)
    if recipe.data is make_data:
        check_joining(tokenizer)
    model = recipe.model(flags, tokenizer)
    return tokenizer, model, recipe.rows(flags, tokenizer, model)


def model_of(auto_class: Any, flags: Any, tokenizer) -> Any:
    """Return the model of `auto_class` that the flags name, which fits the tokenizer."""
    config = recipes.load_config(flags, tokenizer, flags.hub_token)
    recipes.check_vocabulary(tokenizer, config)
    return recipes.load_model(auto_class, flags, config, seed=flags.seed, token=flags.hub_token)


def block_size(asked: int | None, tokenizer, longest: int | None, *, flag_name: str, most: int) -> int:
    """Return the tokens a row: as asked, or as many as tokenizer and model allow, at most `most`."""
    if asked is None:
        return min(tokenizer.model_max_length, most if longest is None else longest, most)
    if longest is not None and asked > longest:
        raise UsageError(f"{flag_name} {asked} is more than the {longest} positions of the model: lower it.")
    if asked < 2:
        raise UsageError(f"{flag_name} is {asked}: a row of fewer than 2 tokens has nothing to predict.")
    return asked


def check_evaluation(flags: Any) -> None:
    """Raise `UsageError` unless the flags describe an evaluation."""
    flags.check_numbers()
    flags.check_texts()
    check_dtypes(flags)
    if not flags.do_eval:
        raise UsageError("Without training and evaluation nothing is left to do: leave --do_eval False out.")
    if flags.streaming:
        raise UsageError("--streaming is for training, and an evaluation reads its texts whole: leave it out.")
    if flags.model_name_or_path is None:
        raise UsageError("There is nothing to evaluate: give --model_name_or_path.")
    if not (flags.validation_file or flags.train_file or flags.dataset_name):
        raise UsageError("There are no texts to evaluate on: give --validation_file or --dataset_name.")


def check_training(flags: Any) -> None:
    """Raise `UsageError` for values that no training can have, and for flags that do not go together."""
    check_dtypes(flags)
    flags.check_training()
    flags.check_texts()
    check_epsilon(flags, flags)
    if flags.num_train_steps is not None and flags.max_steps not in (-1, flags.num_train_steps):
        raise UsageError(
            f"--num_train_steps {flags.num_train_steps} and --max_steps {flags.max_steps} mean the same: give one."
        )
    if flags.streaming:
        count_steps(flags, None)
        if flags.do_eval and not flags.validation_file and flags.num_eval_samples < 1:
            raise UsageError(
                f"--num_eval_samples is {flags.num_eval_samples}: it must be at least 1, or --do_eval False, or give "
                "--validation_file."
            )


def count_steps(flags: Any, steps_per_epoch: int | None) -> int:
    """Return the optimizer steps of the run."""
    if flags.num_train_steps is not None:
        return flags.num_train_steps
    if steps_per_epoch is None and flags.max_steps < 1:
        raise UsageError("A stream has no epochs that could be counted: give --num_train_steps.")
    return recipes.count_steps(flags, steps_per_epoch or 0)


def with_dropout(module, params, rng: jax.Array | None) -> Callable[..., Any]:
    """Return `module.apply` on `params`, with dropout from the key `rng`, or without where it is None."""
    options: dict[str, Any] = {"deterministic": rng is None, "rngs": None if rng is None else {"dropout": rng}}
    return partial(module.apply, {"params": params}, **options)
