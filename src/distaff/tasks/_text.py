"""The course of a recipe that learns from raw text: texts, rows of tokens, training, evaluation, folder.

A recipe says what is its own in a `TextRecipe`; the rest is here once.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from distaff.core.errors import DataError, UsageError
from distaff.core.mesh import make_mesh
from distaff.data.batches import Batches, Collate
from distaff.data.documents import check_joining, joining_tokenizer, load_documents
from distaff.data.stream import TextStream
from distaff.data.text import check_ids, load_texts, split_validation, tokenize_blocks
from distaff.tasks import _folder
from distaff.tasks import _recipe as recipes
from distaff.tasks._flags import ModelFlags, TextSourceFlags, TrainingFlags, check_dtypes, check_epsilon, flag
from distaff.train import evaluate, fit, make_optimizer
from distaff.train.step import LossFunction

logger = logging.getLogger("distaff")


@dataclass(kw_only=True)
class DocumentFlags(ModelFlags, TextSourceFlags, TrainingFlags):
    """Flags of the recipes that read documents."""

    keep_linebreaks: bool = flag(
        True, "Read a .txt file as one document with its line breaks; False: each line is a document."
    )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a recipe makes of texts.

    block: tokens of a row that is cut from the joined texts; what the model sees of it is the business of `collate`.
    loss_fn: as `train.fit` wants it. tokens: of a host batch, for the log.
    advice: what to do where the whole text has `{total}` tokens, fewer than a block.
    """

    block: int
    collate: Collate
    loss_fn: LossFunction
    tokens: Callable[[dict[str, np.ndarray]], int]
    advice: str


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """What a recipe is called, the task of its model card, its class of models, and its rows.

    rows: `(flags, tokenizer, model) -> Rows`.
    """

    name: str
    task: str
    auto_class: Any
    rows: Callable[[Any, Any, Any], Rows]


def perplexity(values: dict[str, float]) -> dict[str, float]:
    """Return the exponential of the loss."""
    return {"perplexity": math.exp(min(values["loss"], 700.0))} if "loss" in values else {}


# Data.


@dataclass(frozen=True)
class TextData:
    """Training batches, None without training, and evaluation batches with their number."""

    train: Any
    evaluation: Batches | None

    @property
    def eval_steps(self) -> int:
        """The number of evaluation batches."""
        return self.evaluation.steps_per_epoch if self.evaluation else 0


@dataclass(frozen=True)
class Texts:
    """Reads texts by the flags; those of a file carry the eos token themselves where line breaks are kept."""

    flags: DocumentFlags
    eos_token: str

    def stream(self, held_out: int) -> Any:
        """Return the texts to train on as they come, behind `held_out` to evaluate on."""
        most = None if self.flags.max_train_samples is None else self.flags.max_train_samples + held_out
        return self._load(self.flags.train_file, self.flags.dataset_name, limit=most, streaming=True)

    def validation(self) -> Any:
        """Return the texts of --validation_file, at most --max_eval_samples."""
        return _first(self._load(self.flags.validation_file, None), self.flags.max_eval_samples)

    def _load(self, files: str | None, dataset: str | None, *, limit=None, streaming=False, split="train") -> Any:
        flags = self.flags
        if files and not dataset and flags.keep_linebreaks:
            return load_documents(
                files,
                eos_token=self.eos_token,
                text_column=flags.text_column,
                max_samples=limit,
                cache_dir=flags.cache_dir,
                streaming=streaming,
            )
        return load_texts(
            files=files,
            dataset_name=dataset,
            dataset_config_name=flags.dataset_config_name,
            text_column=flags.text_column,
            split=split,
            max_samples=limit,
            cache_dir=flags.cache_dir,
            token=flags.hub_token,
            streaming=streaming,
        )

    def split(self) -> tuple[Any, Any]:
        """Return the texts to train on and to evaluate on, each None where not asked for."""
        flags = self.flags
        files, dataset = flags.train_file, flags.dataset_name
        train = evaluation = None
        if flags.do_eval and flags.validation_file:
            evaluation = self.validation()
        elif flags.do_eval and dataset and not files and self._has_validation():
            evaluation = _first(self._load(None, dataset, split="validation"), flags.max_eval_samples)
        if flags.do_train or (flags.do_eval and evaluation is None):
            train = self._load(files, dataset)
        if flags.do_eval and evaluation is None:
            train, evaluation = split_validation(train, percentage=flags.validation_split_percentage)
            evaluation = _first(evaluation, flags.max_eval_samples)
        return _first(train, flags.max_train_samples) if flags.do_train else None, evaluation

    def _has_validation(self) -> bool:
        """Tell whether the dataset has texts of its own to evaluate on."""
        from distaff.data.hub_text import split_names

        flags = self.flags
        names = split_names(str(flags.dataset_name), config_name=flags.dataset_config_name, token=flags.hub_token)
        return "validation" in names


def _first(texts, count: int | None):
    return texts if count is None else texts.select(range(min(count, len(texts))))


def make_data(flags: DocumentFlags, tokenizer, rows: Rows, *, vocab_size: int, sizes: tuple[int, int]) -> TextData:
    """Read, tokenise and batch the texts; `sizes` are the rows of a training and of an evaluation batch."""
    processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    texts = Texts(flags, tokenizer.eos_token)

    def cut(documents, *, files: str | None):
        return tokenize_blocks(
            documents,
            tokenizer=_joining(flags, tokenizer, files),
            block=rows.block,
            num_proc=flags.preprocessing_num_workers,
            overwrite_cache=flags.overwrite_cache,
            advice=rows.advice,
        )

    def batches(blocks, batch_size: int, *, shuffle: bool) -> Batches:
        check_ids(blocks, vocab_size=vocab_size)
        return Batches(
            blocks,
            collate=rows.collate,
            batch_size=batch_size,
            seed=flags.seed,
            shuffle=shuffle,
            max_length=rows.block,
            **processes,
        )

    held_out: Any = None
    if flags.streaming:
        count = held_out_texts(flags)
        train: Any = TextStream(
            texts.stream(count),
            tokenizer=_joining(flags, tokenizer, flags.train_file),
            collate=rows.collate,
            block=rows.block,
            batch_size=sizes[0],
            vocab_size=vocab_size,
            num_eval_samples=count,
            window=flags.shuffle_buffer_size,
            seed=flags.seed,
            advice=rows.advice,
            **processes,
        )
        if flags.do_eval and flags.validation_file:
            held_out = cut(texts.validation(), files=flags.validation_file)
        elif flags.do_eval:
            held_out = train.evaluation()
    else:
        documents, evaluated = texts.split()
        train = None
        if documents is not None:
            train = batches(cut(documents, files=flags.train_file), sizes[0], shuffle=True)
        if evaluated is not None:
            held_out = cut(evaluated, files=flags.validation_file or flags.train_file)
    return TextData(train, None if held_out is None else batches(held_out, sizes[1], shuffle=False))


def held_out_texts(flags: DocumentFlags) -> int:
    """Return how many of a stream's first texts are evaluated on."""
    if not flags.do_eval or flags.validation_file:
        return 0
    most = flags.num_eval_samples if flags.max_eval_samples is None else flags.max_eval_samples
    return min(flags.num_eval_samples, most)


def _joining(flags: DocumentFlags, tokenizer, files: str | None):
    return joining_tokenizer(tokenizer, add_eos=not (files and flags.keep_linebreaks))


# Wiring.


def train(recipe: TextRecipe, flags: Any) -> int:
    """Train and evaluate, write the folder, and return the exit code."""
    check_dtypes(flags)
    if not flags.do_train:
        return evaluate_only(recipe, flags)
    flags.check_training()
    flags.check_texts()
    check_epsilon(flags, flags)
    check_together(flags)
    folder = _folder.check_folder(flags)
    tokenizer, model, rows = prepare(recipe, flags)
    mesh = make_mesh()
    sizes = recipes.rows_a_step(flags, mesh)
    data = make_data(flags, tokenizer, rows, vocab_size=model.config.vocab_size, sizes=sizes)
    steps_per_epoch = getattr(data.train, "steps_per_epoch", None)
    plan = recipes.Plan(*sizes, count_steps(flags, steps_per_epoch))
    plan.log(flags, mesh)
    recipes.log_start(flags, flags)
    tx, schedule = make_optimizer(flags.optimizer(), total_steps=plan.total_steps, decay_mask=model.decay_mask())
    result = fit(
        rows.loss_fn,
        params=model.params,
        tx=tx,
        schedule=schedule,
        batches=data.train,
        eval_batches=data.evaluation,
        config=flags.loop(total_steps=plan.total_steps, steps_per_epoch=steps_per_epoch, eval_batches=data.eval_steps),
        mesh=mesh,
        tokens_per_batch=rows.tokens,
        derived=perplexity,
        on_start=partial(_folder.begin, folder, flags, recipe.name),
    )
    if result.interrupted:
        logger.warning("Stopped at step %d; go on with --resume_from_checkpoint.", result.step)
        return 128 + result.interrupted
    metrics = result.metrics
    if not metrics:
        # Resumed at its last step: nothing was trained, and what was measured then stands in the log.
        logger.info("All %d steps were done before; the model is written again.", result.step)
        metrics = _folder.logged_at(folder, result.step)
        if flags.do_eval and "eval_loss" not in metrics:
            metrics |= measure(rows, result.state.params, data, mesh)
    if jax.process_index() == 0:
        recipes.finish(
            folder,
            flags,
            model=model,
            params=result.state.params,
            tokenizer=tokenizer,
            task=recipe.task,
            metrics=metrics,
            step=result.step,
        )
    return 0


def measure(rows: Rows, params, data: TextData, mesh) -> dict[str, float]:
    """Return the figures of an evaluation of `params`, as `eval_...`."""
    assert data.evaluation is not None
    values = evaluate(rows.loss_fn, params=params, batches=data.evaluation, steps=data.eval_steps, mesh=mesh)
    if "loss" not in values:
        raise DataError("No token of the evaluation texts is scored, so there is nothing to measure: give more text.")
    return {f"eval_{name}": value for name, value in (values | perplexity(values)).items()}


def evaluate_only(recipe: TextRecipe, flags: Any) -> int:
    """Evaluate a checkpoint, print the metrics and, with --output_dir, write them."""
    check_evaluation(flags)
    flags.do_train = False
    folder = _folder.output_folder(flags.output_dir) if flags.output_dir is not None else None
    tokenizer, model, rows = prepare(recipe, flags)
    mesh = make_mesh()
    sizes = recipes.rows_a_step(flags, mesh)
    data = make_data(flags, tokenizer, rows, vocab_size=model.config.vocab_size, sizes=sizes)
    values = measure(rows, model.params, data, mesh)
    for name, value in values.items():
        print(f"{name} = {value:.6g}")
    if folder is not None:
        _folder.write_results(folder, {"eval": values}, add=True)
    return 0


def prepare(recipe: TextRecipe, flags: Any) -> tuple[Any, Any, Rows]:
    """Return tokenizer, model and rows, which fit each other."""
    tokenizer = recipes.load_tokenizer(flags, flags.hub_token)
    check_joining(tokenizer)
    config = recipes.load_config(flags, tokenizer, flags.hub_token)
    recipes.check_vocabulary(tokenizer, config)
    model = recipes.load_model(recipe.auto_class, flags, config, seed=flags.seed, token=flags.hub_token)
    return tokenizer, model, recipe.rows(flags, tokenizer, model)


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


def check_together(flags: Any) -> None:
    """Raise `UsageError` for flags that do not go together."""
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
    steps = flags.num_train_steps or flags.max_steps
    if steps > 0:
        return steps
    if steps_per_epoch is None:
        raise UsageError("A stream has no epochs that could be counted: give --num_train_steps.")
    return max(1, math.ceil(flags.num_train_epochs * steps_per_epoch))


def with_dropout(module, params, rng: jax.Array | None) -> Callable[..., Any]:
    """Return `module.apply` on `params`, with dropout from the key `rng`, or without where it is None."""
    options: dict[str, Any] = {"deterministic": rng is None, "rngs": None if rng is None else {"dropout": rng}}
    return partial(module.apply, {"params": params}, **options)
