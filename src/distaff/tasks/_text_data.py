"""What recipes that learn from raw text make of it: the texts that the flags name, rows of tokens, and batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from distaff.data.batches import Batches, Collate
from distaff.data.documents import joining_tokenizer, load_documents
from distaff.data.stream import TextStream
from distaff.data.text import check_ids, load_texts, split_validation, tokenize_blocks
from distaff.tasks._flags import ModelFlags, TextSourceFlags, TrainingFlags, flag
from distaff.train.step import LossFunction


@dataclass(kw_only=True)
class DocumentFlags(ModelFlags, TextSourceFlags, TrainingFlags):
    """Flags of the recipes that read documents."""

    keep_linebreaks: bool = flag(
        True, "Read a .txt file as one document with its line breaks; False: each line is a document."
    )


def perplexity(values: dict[str, float]) -> dict[str, float]:
    """Return the exponential of the loss."""
    return {"perplexity": math.exp(min(values["loss"], 700.0))} if "loss" in values else {}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a recipe makes of texts.

    block: tokens of a row that is cut from the joined texts; what the model sees of it is the business of `collate`.
    loss_fn: as `train.fit` wants it. tokens: of a host batch, for the log: the key whose sum it is, or a function.
    derived: figures that follow from the means. advice: what to do where the whole text has `{total}` tokens, fewer
    than a block. unscored: what to do where no token of the evaluation is scored.
    """

    block: int
    collate: Collate
    loss_fn: LossFunction
    tokens: str | Callable[[dict[str, np.ndarray]], int]
    derived: Callable[[dict[str, float]], dict[str, float]] = perplexity
    advice: str = "lower --max_seq_length to at most {total}"
    unscored: str = "give more text"


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
    """Reads texts by the flags; with an `eos_token` and kept line breaks, those of files are documents that it ends."""

    flags: Any
    eos_token: str | None = None

    def stream(self, held_out: int) -> Any:
        """Return the texts to train on as they come, behind `held_out` to evaluate on."""
        most = None if self.flags.max_train_samples is None else self.flags.max_train_samples + held_out
        return self._load(self.flags.train_file, self.flags.dataset_name, limit=most, streaming=True)

    def validation(self) -> Any:
        """Return the texts of --validation_file, at most --max_eval_samples."""
        return _first(self._load(self.flags.validation_file, None), self.flags.max_eval_samples)

    def _load(self, files: str | None, dataset: str | None, *, limit=None, streaming=False, split="train") -> Any:
        flags = self.flags
        if self.eos_token is not None and files and not dataset and flags.keep_linebreaks:
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
    """Read, tokenise and batch documents; `sizes` are the rows of a training and of an evaluation batch."""

    def joining(files: str | None):
        return joining_tokenizer(tokenizer, add_eos=not (files and flags.keep_linebreaks))

    def cut(documents, files: str | None):
        return tokenize_blocks(
            documents,
            tokenizer=joining(files),
            block=rows.block,
            num_proc=flags.preprocessing_num_workers,
            overwrite_cache=flags.overwrite_cache,
            advice=rows.advice,
        )

    texts = Texts(flags, tokenizer.eos_token)
    return batch_texts(flags, texts, rows, cut=cut, joining=joining, vocab_size=vocab_size, sizes=sizes)


def batch_texts(
    flags: Any,
    texts: Texts,
    rows: Rows,
    *,
    cut: Callable[[Any, str | None], Any],
    joining: Callable[[str | None], Any],
    vocab_size: int,
    sizes: tuple[int, int],
    pad_to_max_length: bool = True,
    whole_word: bool = False,
) -> TextData:
    """Put the texts into batches of `sizes`.

    cut: `(texts, the files that they are from) -> rows of ids`. joining: the tokenizer of streamed texts from files.
    """
    processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}

    def batches(blocks, batch_size: int, *, shuffle: bool) -> Batches:
        check_ids(blocks, vocab_size=vocab_size)
        return Batches(
            blocks,
            collate=rows.collate,
            batch_size=batch_size,
            seed=flags.seed,
            shuffle=shuffle,
            max_length=rows.block,
            pad_to_max_length=pad_to_max_length,
            **processes,
        )

    train: Any = None
    held_out: Any = None
    if flags.streaming:
        count = held_out_texts(flags)
        train = TextStream(
            texts.stream(count),
            tokenizer=joining(flags.train_file),
            collate=rows.collate,
            block=rows.block,
            batch_size=sizes[0],
            vocab_size=vocab_size,
            num_eval_samples=count,
            window=flags.shuffle_buffer_size,
            seed=flags.seed,
            whole_word=whole_word,
            advice=rows.advice,
            **processes,
        )
        if flags.do_eval and flags.validation_file:
            held_out = cut(texts.validation(), flags.validation_file)
        elif flags.do_eval:
            held_out = train.evaluation()
    else:
        learnt, evaluated = texts.split()
        if learnt is not None:
            train = batches(cut(learnt, flags.train_file), sizes[0], shuffle=True)
        if evaluated is not None:
            held_out = cut(evaluated, flags.validation_file or flags.train_file)
    return TextData(train, None if held_out is None else batches(held_out, sizes[1], shuffle=False))


def held_out_texts(flags: Any) -> int:
    """Return how many of a stream's first texts are evaluated on."""
    if not flags.do_eval or flags.validation_file:
        return 0
    most = flags.num_eval_samples if flags.max_eval_samples is None else flags.max_eval_samples
    return min(flags.num_eval_samples, most)
