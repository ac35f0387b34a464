"""Flags, model and batches of tasks that turn one text into another, and the texts that a model writes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distaff.core.errors import UsageError
from distaff.core.tree import Tree
from distaff.data.batches import Batches
from distaff.data.columns import row_lengths
from distaff.data.pairs import PairCollate, PairColumns, load_pairs, tokenize_pairs
from distaff.data.text import check_ids, split_validation
from distaff.models.auto import FlaxAutoModelForSeq2SeqLM
from distaff.tasks import _recipe as recipe
from distaff.tasks._flags import ModelFlags, TrainingFlags, check_dtypes, check_positive, flag

# The defaults of the old script, where model and tokenizer allow so many.
SOURCE_LENGTH, TARGET_LENGTH = 1024, 128
_GENERATION_IDS = "bos_token_id eos_token_id pad_token_id forced_eos_token_id".split()
# Lengths are multiples of this, so that data that grew by a word does not mean other programs.
_LENGTH_MULTIPLE = 8


@dataclass(kw_only=True)
class Seq2SeqFlags(ModelFlags, TrainingFlags):
    """Flags that summarization and translation share."""

    dataset_name: str | None = flag(None, "Dataset of the Hub, or a folder that save_to_disk wrote.")
    dataset_config_name: str | None = flag(None, "Configuration of the dataset.")
    train_file: str | None = flag(None, "Pairs to train on: .jsonl, .json, .csv or .parquet; commas and globs.")
    validation_file: str | None = flag(None, "Pairs to evaluate on.")
    test_file: str | None = flag(None, "Texts to write predictions for; targets may be absent.")
    validation_split_percentage: int = flag(5, "Percent of the training pairs to evaluate on if there are no others.")
    skip_blank_pairs: bool = flag(False, "Leave out rows that lack source or target, instead of refusing them.")
    source_prefix: str | None = flag(None, "Text before each source, by default what the checkpoint's config holds.")
    max_source_length: int | None = flag(None, "Tokens of a source at most, by default 1024 or what the model has.")
    max_target_length: int | None = flag(None, "Tokens of a target at most, by default 128 or what the model has.")
    val_max_target_length: int | None = flag(
        None, "The same in evaluation, and of generated texts; by default --max_target_length."
    )
    pad_to_max_length: bool = flag(True, "Pad sources to the longest of the data, not to the nearest of a few lengths.")
    max_train_samples: int | None = flag(None, "Use at most so many training pairs.")
    max_eval_samples: int | None = flag(None, "Use at most so many evaluation pairs.")
    max_predict_samples: int | None = flag(None, "Use at most so many rows of the test data.")
    preprocessing_num_workers: int | None = flag(None, "Processes for tokenising.")
    overwrite_cache: bool = flag(False, "Tokenise again although it is cached.")
    label_smoothing_factor: float = flag(0.0, "Part of the target that is spread over the vocabulary, in training.")
    predict_with_generate: bool = flag(False, "Generate in evaluations too, and score the texts.")
    num_beams: int | None = flag(None, "Beams of generation, by default the config's, or 1.")
    do_predict: bool = flag(False, "Generate for the test data and write generated_predictions.txt.")

    def check(self) -> None:
        """Raise `UsageError` for values that neither a training nor an evaluation can have."""
        self.check_numbers()
        check_dtypes(self)
        if not 0 <= self.label_smoothing_factor < 1:
            raise UsageError(
                f"--label_smoothing_factor is {self.label_smoothing_factor}: it must be at least 0 and less than 1."
            )
        check_positive(
            self,
            "max_source_length max_target_length val_max_target_length num_beams max_train_samples max_eval_samples "
            "max_predict_samples preprocessing_num_workers",
        )
        if self.do_predict and not (self.test_file or self.dataset_name):
            raise UsageError("--do_predict has nothing to predict for: give --test_file.")
        if (self.do_predict or self.predict_with_generate) and jax.process_count() > 1:
            raise UsageError("Texts are generated in one process: leave --predict_with_generate and --do_predict out.")


@dataclass(frozen=True)
class Task:
    """What makes it this task.

    name: of the command. key: under which a config's `task_specific_params` keep prefix and beams. pipeline: the Hub's
    name. columns: where source and target stand, in data to learn from and in data to predict for.
    scores: of generated texts and their targets. set_up: prepares tokenizer and config.
    """

    name: str
    key: str
    pipeline: str
    columns: PairColumns
    predict_columns: PairColumns
    scores: Callable[[list[str], list[str]], dict[str, float]]
    set_up: Callable[[Any, Any], None] = field(default=lambda tokenizer, config: None)


# Data.


@dataclass(frozen=True)
class Lengths:
    """Tokens at most: of a source, of a target in training, of a target elsewhere."""

    source: int
    target: int
    val_target: int


def lengths_of(flags: Seq2SeqFlags, tokenizer, longest: int | None) -> Lengths:
    """Return lengths that the model, whose rows have `longest` tokens at most, can take."""

    def allowed(name: str, default: int) -> int:
        value = getattr(flags, name)
        if value is None:
            return min(default, tokenizer.model_max_length, longest or default)
        if longest is not None and value > longest:
            raise UsageError(f"--{name} {value} is more than the {longest} positions of the model: lower it.")
        return value

    target = allowed("max_target_length", TARGET_LENGTH)
    return Lengths(allowed("max_source_length", SOURCE_LENGTH), target, allowed("val_max_target_length", target))


def read_pairs(flags: Seq2SeqFlags, task: Task) -> tuple[Any, Any]:
    """Return the pairs to train on and to evaluate on, each None where not asked for."""
    train = evaluation = None
    own = bool(flags.validation_file) or _has_split(flags, "validation")
    if flags.do_train or (flags.do_eval and not own):
        train = load(flags, task.columns, flags.train_file, "train")
    if flags.do_eval and own:
        evaluation = load(flags, task.columns, flags.validation_file, "validation")
    elif flags.do_eval:
        train, evaluation = split_validation(train, percentage=flags.validation_split_percentage)
    train = first(train, flags.max_train_samples) if flags.do_train else None
    return train, first(evaluation, flags.max_eval_samples)


def _has_split(flags: Seq2SeqFlags, split: str) -> bool:
    from distaff.data.hub_text import split_names

    return flags.dataset_name is not None and split in split_names(
        flags.dataset_name, config_name=flags.dataset_config_name, token=flags.hub_token
    )


def read_test(flags: Seq2SeqFlags, task: Task) -> Any:
    """Return the rows to predict for, None where not asked for."""
    if not flags.do_predict:
        return None
    return first(load(flags, task.predict_columns, flags.test_file, "test"), flags.max_predict_samples)


def load(flags: Seq2SeqFlags, columns: PairColumns, files: str | None, split: str):
    """Return the pairs of `files`, or of the split of --dataset_name."""
    return load_pairs(
        columns,
        files=files,
        dataset_name=flags.dataset_name,
        dataset_config_name=flags.dataset_config_name,
        split=split,
        cache_dir=flags.cache_dir,
        token=flags.hub_token,
    )


def first(pairs, count: int | None):
    """Return at most `count` rows of `pairs`."""
    return pairs if pairs is None or count is None else pairs.select(range(min(count, len(pairs))))


def make_batches(flags: Seq2SeqFlags, side: "Side", pairs, rows: int, *, train: bool) -> Batches:
    """Tokenise the pairs and put them into batches, padded to the longest of them."""
    target = side.lengths.target if train else side.lengths.val_target
    dataset = tokenize_pairs(
        pairs,
        tokenizer=side.tokenizer,
        max_source_length=side.lengths.source,
        max_target_length=target,
        prefix=side.prefix,
        num_proc=flags.preprocessing_num_workers,
        overwrite_cache=flags.overwrite_cache,
    )
    for column in dataset.column_names:
        check_ids(dataset, vocab_size=side.model.config.vocab_size, column=column)
    longest = _padded(dataset, "labels", target) if "labels" in dataset.column_names else 0
    return Batches(
        dataset,
        collate=PairCollate(side.pad_id, longest),
        batch_size=rows,
        seed=flags.seed,
        shuffle=train,
        max_length=_padded(dataset, "input_ids", side.lengths.source),
        pad_to_max_length=flags.pad_to_max_length,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


@dataclass(frozen=True)
class HeldOut:
    """Batches that are not learnt from, and the targets `[rows]` of their rows, None where there are none."""

    batches: Batches
    targets: list[str | None]


def hold_out(flags: Seq2SeqFlags, side: "Side", pairs, rows: int) -> HeldOut | None:
    """Return the batches of `pairs`, None where there are no pairs."""
    if pairs is None:
        return None
    return HeldOut(make_batches(flags, side, pairs, rows, train=False), pairs["target"][:])


def _padded(dataset, column: str, limit: int) -> int:
    longest = int(row_lengths(dataset, column=column).max())
    return min(limit, -(-max(longest, 1) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE)


# Model.


@dataclass(frozen=True)
class Side:
    """What stands on the model's side.

    lengths: of rows. prefix: the text before each source. generation: options of `model.generate`.
    """

    model: Any
    tokenizer: Any
    lengths: Lengths
    prefix: str
    generation: dict[str, Any]

    @property
    def pad_id(self) -> int:
        """The id that rows are padded with; which one does not matter, for padding weighs nothing."""
        pad = self.model.config.pad_token_id
        return 0 if pad is None else pad


def prepare_model(flags: Seq2SeqFlags, task: Task) -> Side:
    """Return model and tokenizer that fit each other; the config keeps what the task needs at its next use."""
    tokenizer = recipe.load_tokenizer(flags, flags.hub_token)
    config = recipe.load_config(flags, tokenizer, flags.hub_token)
    recipe.check_vocabulary(tokenizer, config)
    task.set_up(tokenizer, config)
    every = getattr(config, "task_specific_params", None) or {}
    asked = {"prefix": flags.source_prefix, "num_beams": flags.num_beams}
    settings = {"prefix": getattr(config, "prefix", None) or "", **every.get(task.key, {})}
    settings |= {name: value for name, value in asked.items() if value is not None}
    config.task_specific_params, config.prefix = {**every, task.key: settings}, settings["prefix"]
    model = recipe.load_model(FlaxAutoModelForSeq2SeqLM, flags, config, seed=flags.seed, token=flags.hub_token)
    _check_ends(tokenizer, model)
    lengths = lengths_of(flags, tokenizer, model.longest_input)
    # The start token takes a position too.
    most = lengths.val_target if model.longest_input is None else min(lengths.val_target, model.longest_input - 1)
    generation = {"max_new_tokens": most, "num_beams": settings.get("num_beams", 1)}
    # Said here, because a checkpoint's generation_config.json may hold those of another language.
    generation["decoder_start_token_id"] = model.decoder_start_token_id
    if getattr(config, "forced_bos_token_id", None) is not None:
        generation["forced_bos_token_id"] = config.forced_bos_token_id
    # What is saved writes as it was evaluated, in PyTorch too, which reads no ids of the config beside such a file.
    ids = {name: getattr(config, name, None) for name in _GENERATION_IDS}
    known = {name: value for name, value in ids.items() if value is not None}
    model.generation_config = {**known, **(model.generation_config or {}), **generation}
    return Side(model, tokenizer, lengths, settings["prefix"], generation)


def _check_ends(tokenizer, model) -> None:
    """Raise `UsageError` where the model would never learn to end a text, and see to it that texts have a start."""
    config, ids = model.config, tokenizer(text_target="a")["input_ids"]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if not set(ids) & set(ends):
        raise UsageError(
            f"The tokenizer ends a text with '{tokenizer.convert_ids_to_tokens(ids[-1])}', and the model's end token "
            f"has id {config.eos_token_id}: take the model's tokenizer, or set eos_token_id by --config_overrides."
        )
    if model.decoder_start_token_id is None:
        # Each row of labels starts with its own last token; here they all have the same.
        config.decoder_start_token_id = ids[-1]


# Generated texts.


def generate_texts(side: Side, params: Tree, batches: Batches) -> list[str]:
    """Return a text for each row of `batches`, in their order; the rows that fill up the last batch have none."""
    texts: list[str] = []
    for step in range(batches.steps_per_epoch):
        batch, (_, weights) = batches(step), batches.indices(step)
        outputs = side.model.generate(
            batch["input_ids"],
            batch["attention_mask"],
            params=params,
            **side.generation,
        )
        kept = np.asarray(outputs.sequences)[weights > 0]
        texts += side.tokenizer.batch_decode(kept, skip_special_tokens=True)
    return [text.strip() for text in texts]


def write_lines(path: Path, texts: Iterable[str]) -> None:
    r"""Write a line a text; newlines and backslashes inside stand as \n, \r and \\."""
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(text.translate(escapes) + "\n" for text in texts)
