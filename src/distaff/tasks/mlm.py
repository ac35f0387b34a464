"""Masked language modeling: BERT, RoBERTa, XLM-RoBERTa, from scratch or from a checkpoint.

    distaff train mlm --output_dir roberta-als --model_type roberta --tokenizer_name roberta-als \\
        --train_file a.txt --max_seq_length 128 --per_device_train_batch_size 4 --learning_rate 3e-4 \\
        --warmup_steps 1000 --num_train_epochs 8

`distaff quickstart` runs it on the text that comes with Python; README.md says what it reaches.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from distaff.core.errors import DataError, UsageError
from distaff.core.mesh import make_mesh
from distaff.data.batches import Batches
from distaff.data.masking import MlmCollate, MlmMasking
from distaff.data.stream import TextStream
from distaff.data.text import check_ids, load_texts, split_validation, tokenize_blocks, tokenize_lines
from distaff.models._family import FlaxTextModel
from distaff.models.auto import FlaxAutoModelForMaskedLM
from distaff.nn.vocabulary import cross_entropy_sum, score_sums
from distaff.tasks import _folder
from distaff.tasks import _recipe as recipe
from distaff.tasks import _text as text
from distaff.tasks._flags import ModelFlags, TextFlags, TrainingFlags, check_dtypes, check_epsilon, flag
from distaff.tasks._text import check_evaluation, count_steps, perplexity
from distaff.train import evaluate, fit, make_optimizer

logger = logging.getLogger("distaff")


@dataclass(kw_only=True)
class MlmFlags(ModelFlags, TextFlags, TrainingFlags):
    """Flags of `distaff train mlm` and `distaff eval mlm`."""

    line_by_line: bool = flag(False, "A row for each text, instead of texts joined and cut into full rows.")
    pad_to_max_length: bool = flag(True, "With --line_by_line: pad to the full length, not to the nearest of a few.")
    mlm_probability: float = flag(0.15, "Share of the tokens that are masked.")
    whole_word_mask: bool = flag(False, "Mask words with all their tokens.")


# Loss.


def mlm_loss(module, params, batch: dict[str, jax.Array], rng: jax.Array | None) -> dict[str, tuple[Any, Any]]:
    """Sum the cross-entropy of the hidden tokens over `masked_weights` `[batch, count]`.

    Logits are computed at `masked_positions` `[batch, count]` alone: `[batch, count, vocab]`, a fifth of them all.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    outputs = module.apply(
        {"params": params},
        **inputs,
        masked_positions=batch["masked_positions"],
        deterministic=rng is None,
        lazy_logits=True,
        rngs=None if rng is None else {"dropout": rng},
    )
    labels, weights = batch["masked_labels"], batch["masked_weights"]
    if rng is not None:
        return {"loss": (cross_entropy_sum(outputs.logits, labels, weights), jnp.sum(weights))}
    loss, hits = score_sums(outputs.logits, labels, weights)
    return {"loss": (loss, jnp.sum(weights)), "accuracy": (hits, jnp.sum(weights))}


# Data.


@dataclass(frozen=True)
class MlmData:
    """Training batches, None without training, and evaluation batches with their number."""

    train: Any
    evaluation: Callable[[int], dict[str, Any]] | None
    eval_steps: int


def make_data(
    flags: MlmFlags,
    tokenizer,
    *,
    length: int,
    vocab_size: int,
    rows: tuple[int, int],
    collation: type[MlmCollate] = MlmCollate,
) -> MlmData:
    """Read, tokenise and batch the texts; `rows` are those of a training and of an evaluation batch."""
    masking = MlmMasking.from_tokenizer(
        tokenizer, max_length=length, probability=flags.mlm_probability, whole_word=flags.whole_word_mask
    )
    collate = collation.from_tokenizer(tokenizer, masking=masking, seed=flags.seed)
    processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}

    def batches(dataset, batch_size: int, shuffle: bool) -> Batches:
        check_ids(dataset, vocab_size=vocab_size)
        return Batches(
            dataset,
            collate=collate,
            batch_size=batch_size,
            seed=flags.seed,
            shuffle=shuffle,
            max_length=length,
            pad_to_max_length=flags.pad_to_max_length or not flags.line_by_line,
            **processes,
        )

    held_out: Any = None
    if flags.streaming:
        train: Any = make_stream(flags, tokenizer, collate, length, rows[0], vocab_size, processes)
        if flags.do_eval and flags.validation_file:
            held_out = tokenize(flags, read_validation(flags), tokenizer, length)
        elif flags.do_eval:
            held_out = train.evaluation()
    else:
        texts, eval_texts = read_texts(flags)
        train = None if texts is None else batches(tokenize(flags, texts, tokenizer, length), rows[0], True)
        held_out = None if eval_texts is None else tokenize(flags, eval_texts, tokenizer, length)
    evaluation = None if held_out is None else batches(held_out, rows[1], False)
    return MlmData(train, evaluation, evaluation.steps_per_epoch if evaluation else 0)


def make_stream(flags: MlmFlags, tokenizer, collate, length: int, batch_size: int, vocab_size: int, processes):
    """Return training batches that are read as they come."""
    num_eval_samples = flags.num_eval_samples if flags.do_eval and not flags.validation_file else 0
    if flags.max_eval_samples is not None:
        num_eval_samples = min(num_eval_samples, flags.max_eval_samples)
    most = None if flags.max_train_samples is None else flags.max_train_samples + num_eval_samples
    texts = load_texts(
        files=flags.train_file,
        dataset_name=flags.dataset_name,
        dataset_config_name=flags.dataset_config_name,
        text_column=flags.text_column,
        max_samples=most,
        token=flags.hub_token,
        streaming=True,
    )
    return TextStream(
        texts,
        tokenizer=tokenizer,
        collate=collate,
        block=length,
        batch_size=batch_size,
        vocab_size=vocab_size,
        num_eval_samples=num_eval_samples,
        window=flags.shuffle_buffer_size,
        seed=flags.seed,
        whole_word=flags.whole_word_mask,
        **processes,
    )


def read_texts(flags: MlmFlags):
    """Return the texts to train on and to evaluate on, each None where not asked for."""
    load = partial(
        load_texts,
        dataset_name=flags.dataset_name,
        dataset_config_name=flags.dataset_config_name,
        text_column=flags.text_column,
        cache_dir=flags.cache_dir,
        token=flags.hub_token,
    )
    train = evaluation = None
    if flags.do_eval and flags.validation_file:
        evaluation = read_validation(flags)
    elif flags.do_eval and flags.dataset_name and not flags.train_file and _has_validation(flags):
        evaluation = load(split="validation")
    if flags.do_train or (flags.do_eval and evaluation is None):
        train = load(files=flags.train_file, split="train")
    if flags.do_eval and evaluation is None:
        train, evaluation = split_validation(train, percentage=flags.validation_split_percentage)
    return (
        _first(train, flags.max_train_samples) if flags.do_train else None,
        _first(evaluation, flags.max_eval_samples),
    )


def read_validation(flags: MlmFlags):
    """Return the texts of --validation_file, at most --max_eval_samples."""
    texts = load_texts(files=flags.validation_file, text_column=flags.text_column, cache_dir=flags.cache_dir)
    return _first(texts, flags.max_eval_samples)


def _has_validation(flags: MlmFlags) -> bool:
    """Tell whether the dataset has texts of its own to evaluate on."""
    from distaff.data.hub_text import split_names

    names = split_names(str(flags.dataset_name), config_name=flags.dataset_config_name, token=flags.hub_token)
    return "validation" in names


def _first(texts, count: int | None):
    return texts if texts is None or count is None else texts.select(range(min(count, len(texts))))


def tokenize(flags: MlmFlags, texts, tokenizer, length: int):
    """Return rows of ids: a text each, or the joined texts in rows of `length`."""
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "whole_word": flags.whole_word_mask,
        "num_proc": flags.preprocessing_num_workers,
        "overwrite_cache": flags.overwrite_cache,
    }
    if flags.line_by_line:
        return tokenize_lines(texts, max_length=length, **options)
    return tokenize_blocks(texts, block=length, **options)


# Wiring.


def train(flags: MlmFlags) -> int:
    """Train and evaluate, write the folder, and return the exit code."""
    if not flags.do_train:
        return evaluate_only(flags)
    check_together(flags)
    folder = _folder.check_folder(flags)
    tokenizer, model, length = prepare_model(flags)
    mesh = make_mesh()
    rows = recipe.rows_a_step(flags, mesh)
    data = make_data(flags, tokenizer, length=length, vocab_size=model.config.vocab_size, rows=rows)
    steps_per_epoch = getattr(data.train, "steps_per_epoch", None)
    plan = recipe.Plan(*rows, count_steps(flags, steps_per_epoch))
    plan.log(flags, mesh)
    recipe.log_start(flags, flags)
    tx, schedule = make_optimizer(flags.optimizer(), total_steps=plan.total_steps, decay_mask=model.decay_mask())
    result = fit(
        partial(mlm_loss, model.module),
        params=model.params,
        tx=tx,
        schedule=schedule,
        batches=data.train,
        eval_batches=data.evaluation,
        config=flags.loop(total_steps=plan.total_steps, steps_per_epoch=steps_per_epoch, eval_batches=data.eval_steps),
        mesh=mesh,
        tokens_per_batch="attention_mask",
        derived=perplexity,
        on_start=partial(_folder.begin, folder, flags, "mlm"),
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
            metrics |= measure(model, result.state.params, data, mesh)
    if jax.process_index() == 0:
        recipe.finish(
            folder,
            flags,
            model=model,
            params=result.state.params,
            tokenizer=tokenizer,
            task="fill-mask",
            metrics=metrics,
            step=result.step,
        )
    return 0


def measure(model, params, data: MlmData, mesh) -> dict[str, float]:
    """Return the figures of an evaluation of `params`, as `eval_...`."""
    assert data.evaluation is not None
    loss_fn = partial(mlm_loss, model.module)
    values = evaluate(loss_fn, params=params, batches=data.evaluation, steps=data.eval_steps, mesh=mesh)
    if "loss" not in values:
        raise DataError(
            "No token of the evaluation texts was masked, so there is nothing to measure: give more text, or a higher "
            "--mlm_probability."
        )
    return {f"eval_{name}": value for name, value in (values | perplexity(values)).items()}


def evaluate_only(flags: MlmFlags) -> int:
    """Evaluate a checkpoint, print the metrics and, with --output_dir, write them."""
    check_evaluation(flags)
    flags.do_train = False
    folder = _folder.output_folder(flags.output_dir) if flags.output_dir is not None else None
    tokenizer, model, length = prepare_model(flags)
    mesh = make_mesh()
    rows = recipe.rows_a_step(flags, mesh)
    data = make_data(flags, tokenizer, length=length, vocab_size=model.config.vocab_size, rows=rows)
    values = measure(model, model.params, data, mesh)
    for name, value in values.items():
        print(f"{name} = {value:.6g}")
    if folder is not None:
        _folder.write_results(folder, {"eval": values}, add=True)
    return 0


def prepare_model(flags: MlmFlags) -> tuple[Any, FlaxTextModel, int]:
    """Return tokenizer, model and the tokens a row, which fit each other."""
    tokenizer = recipe.load_tokenizer(flags, flags.hub_token)
    config = recipe.load_config(flags, tokenizer, flags.hub_token)
    recipe.check_vocabulary(tokenizer, config)
    model = recipe.load_model(FlaxAutoModelForMaskedLM, flags, config, seed=flags.seed, token=flags.hub_token)
    return tokenizer, model, recipe.row_length(flags, tokenizer, model.longest_input)


def check_together(flags: MlmFlags) -> None:
    """Raise `UsageError` for values that no training can have, and for flags that do not go together."""
    check_dtypes(flags)
    flags.check_training()
    flags.check_texts()
    check_epsilon(flags, flags)
    text.check_together(flags)
    if flags.streaming and flags.line_by_line:
        raise UsageError("--streaming joins texts into full rows: leave --line_by_line out.")
