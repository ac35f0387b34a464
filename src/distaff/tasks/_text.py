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

from distaff.core.errors import UsageError
from distaff.core.mesh import make_mesh
from distaff.data.batches import Batches, Collate
from distaff.data.documents import check_joining, joining_tokenizer, load_documents
from distaff.data.stream import TextStream
from distaff.data.text import check_ids, load_texts, split_validation, tokenize_blocks
from distaff.tasks import _recipe as recipes
from distaff.tasks._flags import ModelFlags, TextSourceFlags, TrainingFlags, check_dtypes, flag
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

    def training(self, *, streaming: bool = False) -> Any:
        """Return the texts to train on, before any are held out."""
        limit = self.flags.max_train_samples if streaming else None
        return self._load(self.flags.train_file, self.flags.dataset_name, limit=limit, streaming=streaming)

    def validation(self) -> Any:
        """Return the texts of --validation_file."""
        return _first(self._load(self.flags.validation_file, None), self.flags.max_eval_samples, "max_eval_samples")

    def _load(
        self, files: str | None, dataset: str | None, *, limit: int | None = None, streaming: bool = False
    ) -> Any:
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
            max_samples=limit,
            cache_dir=flags.cache_dir,
            token=flags.hub_token,
            streaming=streaming,
        )

    def split(self) -> tuple[Any, Any]:
        """Return the texts to train on and to evaluate on, each None where not asked for."""
        flags = self.flags
        train = evaluation = None
        if flags.do_train or (flags.do_eval and not flags.validation_file):
            train = self.training()
        if flags.do_eval and flags.validation_file:
            evaluation = self.validation()
        elif flags.do_eval:
            train, evaluation = split_validation(train, percentage=flags.validation_split_percentage)
            evaluation = _first(evaluation, flags.max_eval_samples, "max_eval_samples")
        return _first(train, flags.max_train_samples, "max_train_samples") if flags.do_train else None, evaluation


def _first(texts, count: int | None, name: str):
    if texts is None or count is None:
        return texts
    if count < 1:
        raise UsageError(f"--{name} is {count}: it must be at least 1.")
    return texts.select(range(min(count, len(texts))))


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

    if flags.streaming and flags.do_train:
        held_out = flags.do_eval and not flags.validation_file
        train: Any = TextStream(
            texts.training(streaming=True),
            tokenizer=_joining(flags, tokenizer, flags.train_file),
            collate=rows.collate,
            block=rows.block,
            batch_size=sizes[0],
            vocab_size=vocab_size,
            num_eval_samples=flags.num_eval_samples if held_out else 0,
            window=flags.shuffle_buffer_size,
            seed=flags.seed,
            advice=rows.advice,
            **processes,
        )
        blocks = train.evaluation() if held_out else None
        if flags.do_eval and flags.validation_file:
            blocks = cut(texts.validation(), files=flags.validation_file)
    else:
        documents, evaluated = texts.split()
        train = None
        if documents is not None:
            train = batches(cut(documents, files=flags.train_file), sizes[0], shuffle=True)
        blocks = None if evaluated is None else cut(evaluated, files=flags.validation_file or flags.train_file)
    return TextData(train, None if blocks is None else batches(blocks, sizes[1], shuffle=False))


def _joining(flags: DocumentFlags, tokenizer, files: str | None):
    return joining_tokenizer(tokenizer, add_eos=not (files and flags.keep_linebreaks))


# Wiring.


def train(recipe: TextRecipe, flags: Any) -> int:
    """Train and evaluate, write the folder, and return the exit code."""
    flags.check_training()
    check_dtypes(flags)
    if not flags.do_train:
        return evaluate_only(recipe, flags)
    folder = recipes.prepare_folder(flags, recipe.name)
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
    )
    if result.interrupted:
        logger.warning("Stopped at step %d; go on with --resume_from_checkpoint.", result.step)
        return 128 + result.interrupted
    if not result.metrics:
        # Resumed at its last step: nothing was trained, and what was measured then stands in the folder.
        logger.info("All %d steps were done before; the model is written again.", result.step)
    metrics = result.metrics or recipes.read_results(folder)
    if jax.process_index() == 0:
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        trained = {name: value for name, value in metrics.items() if not name.startswith("eval_")}
        recipes.write_results(folder, "train", {**trained, "train_steps": result.step})
        recipes.write_results(folder, "eval", evaluated)
        recipes.finish(
            folder,
            flags,
            model=model,
            params=result.state.params,
            tokenizer=tokenizer,
            task=recipe.task,
            metrics={name.removeprefix("eval_"): value for name, value in evaluated.items()},
        )
    return 0


def evaluate_only(recipe: TextRecipe, flags: Any) -> int:
    """Evaluate a checkpoint, print the metrics and, with --output_dir, write them."""
    flags.do_train, flags.do_eval = False, True
    if flags.model_name_or_path is None:
        raise UsageError("There is nothing to evaluate: give --model_name_or_path.")
    tokenizer, model, rows = prepare(recipe, flags)
    mesh = make_mesh()
    sizes = recipes.rows_a_step(flags, mesh)
    data = make_data(flags, tokenizer, rows, vocab_size=model.config.vocab_size, sizes=sizes)
    assert data.evaluation is not None
    values = evaluate(rows.loss_fn, params=model.params, batches=data.evaluation, steps=data.eval_steps, mesh=mesh)
    values |= perplexity(values)
    named = {f"eval_{name}": value for name, value in values.items()}
    for name, value in named.items():
        print(f"{name} = {value:.6g}")
    if flags.output_dir:
        recipes.write_results(recipes.results_folder(flags.output_dir), "eval", named)
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
