"""Raw text to rows of token ids: read once, tokenised once, memory-mapped from then on."""

import hashlib
import itertools
import json
import logging
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distaff.core.errors import DataError, UsageError
from distaff.data.arrow import replacing, strings, write_table
from distaff.data.columns import flat_values
from distaff.data.encode import encode_texts, tokenizer_identity
from distaff.data.files import ReadCount, expand_files, read_texts

logger = logging.getLogger(__name__)

# Goes into the names of cached files: raise it when what they hold changes.
_FORMAT = 2
_BATCH_ROWS, _BATCH_BYTES = 1000, 4 << 20


def load_texts(
    *,
    files: str | Sequence[str] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    text_column: str | None = None,
    max_samples: int | None = None,
    cache_dir: str | os.PathLike | None = None,
    streaming: bool = False,
    token: str | bool | None = None,
) -> Any:
    """Return a dataset with the one column "text", without blank texts.

    From `files` (`read_texts` says how each format is read) or from a dataset of the Hub, a folder that
    `save_to_disk` wrote, or whatever else `datasets.load_dataset` takes; `split` is for these. Files are converted once
    and cached by their path, size and time of change.

    Returns:
        a memory-mapped `datasets.Dataset`, or with `streaming` a `datasets.IterableDataset`.
    """
    if bool(files) == bool(dataset_name):
        raise UsageError("Texts come either from files or from a dataset: give one of --train_file and --dataset_name.")
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"{max_samples} samples leave nothing to read: the limit must be at least 1.")
    if files:
        paths = expand_files(files)
        texts = _stream_files(paths, text_column) if streaming else _cached_files(paths, text_column, cache_dir)
    else:
        from distaff.data.hub_text import load_hub_texts

        texts = load_hub_texts(
            str(dataset_name),
            config_name=dataset_config_name,
            split=split,
            text_column=text_column,
            cache_dir=cache_dir,
            streaming=streaming,
            token=token,
        )
    if max_samples is None:
        return texts
    return texts.take(max_samples) if streaming else texts.select(range(min(max_samples, len(texts))))


def _report(path: Path, count: ReadCount) -> None:
    logger.info("%s: %d texts, %d blank rows left out.", path, count.texts, count.blank)


def _generate(paths: list[Path], column: str | None) -> Iterator[dict[str, str]]:
    for path in paths:
        count = ReadCount()
        for text in read_texts(path, column=column, count=count):
            yield {"text": text}
        _report(path, count)


def _stream_files(paths: list[Path], column: str | None) -> datasets.IterableDataset:
    # A list among the arguments is what `datasets` counts as shards, which it deals out to processes.
    return datasets.IterableDataset.from_generator(
        _generate, features=_TEXT, gen_kwargs={"paths": paths, "column": column}
    )


_TEXT = datasets.Features({"text": datasets.Value("string")})


def _cached_files(paths: list[Path], column: str | None, cache_dir: str | os.PathLike | None) -> datasets.Dataset:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.sha256(json.dumps([_FORMAT, stats, column]).encode()).hexdigest()[:20]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "distaff-text" / key
    target, counts_file = folder / "texts.arrow", folder / "counts.json"
    if not counts_file.exists():
        counts = [ReadCount() for _ in paths]
        texts = itertools.chain.from_iterable(
            read_texts(path, column=column, count=count) for path, count in zip(paths, counts)
        )
        write_table(target, pa.schema({"text": pa.string()}), _text_batches(texts))
        # Written last: the cache is complete once it is there.
        with replacing(counts_file) as partial:
            partial.write_text(json.dumps([asdict(count) for count in counts]))
    for path, count in zip(paths, json.loads(counts_file.read_text())):
        _report(path, ReadCount(**count))
    return datasets.Dataset.from_file(str(target))


def _text_batches(texts: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """Yield record batches of at most `_BATCH_ROWS` texts and about `_BATCH_BYTES`."""
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if len(held) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield pa.record_batch({"text": strings(held)})
            held, size = [], 0
    if held:
        yield pa.record_batch({"text": strings(held)})


def split_validation(dataset: datasets.Dataset, *, percentage: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return (train, validation): the first `percentage` % of the rows validate, as in the old script."""
    if not 0 < percentage < 100:
        raise UsageError(f"--validation_split_percentage is {percentage}: it must be between 1 and 99.")
    if len(dataset) < 2:
        raise DataError(f"{len(dataset)} text cannot be split for validation: give a --validation_file.")
    count = min(len(dataset) - 1, max(1, round(len(dataset) * percentage / 100)))
    return dataset.select(range(count, len(dataset))), dataset.select(range(count))


def tokenize_lines(
    dataset: datasets.Dataset,
    *,
    tokenizer: Any,
    max_length: int,
    whole_word: bool = False,
    num_proc: int | None = None,
    overwrite_cache: bool = False,
) -> datasets.Dataset:
    """Return one row a text: `input_ids` with the tokenizer's special tokens around, at most `max_length` long.

    What is cut off is reported by the number of rows. With `whole_word` the column `word_start` is 1 at the first
    token of each word, as the tokenizer's pre-tokenizer sees words, and at special tokens.
    """
    _check_length(tokenizer, max_length)
    rows = _tokenize(dataset, tokenizer, max_length, whole_word, num_proc, overwrite_cache)
    cut = sum(int(np.sum(table["cut"].to_numpy())) for table in rows.with_format("arrow").iter(batch_size=10_000))
    logger.info("%d texts tokenised; %d were longer than %d tokens and are cut.", len(rows), cut, max_length)
    return rows.remove_columns("cut")


def tokenize_blocks(
    dataset: datasets.Dataset,
    *,
    tokenizer: Any,
    block: int,
    whole_word: bool = False,
    num_proc: int | None = None,
    overwrite_cache: bool = False,
    advice: str = "lower --max_seq_length to at most {total}, or use --line_by_line",
) -> datasets.Dataset:
    """Return rows of exactly `block` tokens: the texts, each with its special tokens, joined and cut.

    So BERT's rows read `[CLS] a [SEP] [CLS] b [SEP] ...`, wherever the cuts fall. The rows depend on the texts and
    their order alone. The tokens after the last whole block are left out and their number is reported. `advice` ends
    the error of a text of `{total}` tokens, which is less than a block.
    """
    _check_length(tokenizer, block)
    rows = _tokenize(dataset, tokenizer, None, whole_word, num_proc, overwrite_cache)
    columns = ["input_ids", "word_start"] if whole_word else ["input_ids"]
    tables = rows.with_format("arrow")
    total = sum(len(flat_values(table["input_ids"])) for table in tables.iter(batch_size=_BATCH_ROWS))
    if total < block:
        raise DataError(
            f"The whole text has {total} tokens, less than one block of {block}: {advice.format(total=total)}."
        )
    logger.info(
        "%d blocks of %d tokens from %d texts; the last %d of %d tokens do not fill a block and are left out.",
        total // block,
        block,
        len(rows),
        total % block,
        total,
    )
    batches = _block_batches((table.select(columns) for table in tables.iter(batch_size=_BATCH_ROWS)), block)
    schema = pa.schema({name: pa.list_(_TYPES[name], block) for name in columns})
    if not rows.cache_files:
        return datasets.Dataset(datasets.table.InMemoryTable(pa.Table.from_batches(batches, schema)))
    folder = Path(rows.cache_files[0]["filename"]).parent
    target = folder / f"blocks-{datasets.fingerprint.Hasher.hash((_FORMAT, rows._fingerprint, block))}.arrow"
    if overwrite_cache or not target.exists():
        write_table(target, schema, batches)
    return datasets.Dataset.from_file(str(target))


_TYPES = {"input_ids": pa.int32(), "word_start": pa.int8()}
_FEATURES = {name: datasets.List(datasets.Value(str(kind))) for name, kind in _TYPES.items()}
_FEATURES["cut"] = datasets.Value("bool")


def _check_length(tokenizer: Any, length: int) -> None:
    smallest = tokenizer.num_special_tokens_to_add(pair=False) + 1
    if length < smallest:
        raise UsageError(
            f"Rows of {length} tokens are too short: this tokenizer needs --max_seq_length of {smallest} or more."
        )


def _tokenize(
    dataset: datasets.Dataset,
    tokenizer: Any,
    max_length: int | None,
    whole_word: bool,
    num_proc: int | None,
    overwrite_cache: bool,
) -> datasets.Dataset:
    if len(dataset) == 0:
        raise DataError("There are no texts: there is nothing to tokenise.")
    if whole_word and not tokenizer.is_fast:
        raise UsageError(f"Whole-word masking needs to know words, which {type(tokenizer).__name__} does not tell.")
    columns = ["input_ids", *(["word_start"] if whole_word else []), *(["cut"] if max_length else [])]
    return map_texts(
        dataset,
        encode_texts,
        inputs=["text"],
        arguments={"tokenizer": tokenizer, "max_length": max_length, "whole_word": whole_word},
        features={name: _FEATURES[name] for name in columns},
        depends=(tokenizer_identity(tokenizer), max_length, whole_word),
        num_proc=num_proc,
        overwrite_cache=overwrite_cache,
    )


def map_texts(
    dataset: datasets.Dataset,
    function: Any,
    *,
    inputs: list[str],
    arguments: dict[str, Any],
    features: dict[str, Any],
    depends: Any,
    num_proc: int | None,
    overwrite_cache: bool,
) -> datasets.Dataset:
    """Return the columns `features` that `function(*columns, **arguments)` makes of lists of the texts in `inputs`.

    They are cached by the dataset and by `depends`: everything else that the result depends on.
    """
    # Long texts go in smaller batches, so that memory does not grow with their length.
    size = max(1, dataset.data.nbytes // max(1, len(dataset.data)))
    workers = min(num_proc or 1, len(dataset))
    with _spawned_workers():
        return dataset.map(
            function,
            fn_kwargs=arguments,
            batched=True,
            batch_size=int(min(_BATCH_ROWS, max(1, _BATCH_BYTES // size))),
            input_columns=inputs,
            remove_columns=dataset.column_names,
            features=datasets.Features(features),
            num_proc=workers if workers > 1 else None,
            load_from_cache_file=not overwrite_cache,
            new_fingerprint=datasets.fingerprint.Hasher.hash((_FORMAT, dataset._fingerprint, depends)),
            desc="Tokenising",
        )


def _block_batches(tables: Iterable[pa.Table], block: int) -> Iterator[pa.RecordBatch]:
    """Join the lists of `tables`, column by column, and yield them cut into lists of `block` values."""
    left: dict[str, np.ndarray] = {}
    for table in tables:
        joined = {name: flat_values(table[name]) for name in table.column_names}
        if left:
            joined = {name: np.concatenate([left[name], values]) for name, values in joined.items()}
        whole = len(joined["input_ids"]) // block * block
        left = {name: values[whole:] for name, values in joined.items()}
        if whole:
            yield pa.record_batch(
                {name: pa.FixedSizeListArray.from_arrays(values[:whole], block) for name, values in joined.items()}
            )


@contextmanager
def _spawned_workers() -> Iterator[None]:
    """Let `datasets` start its worker processes afresh: a fork of a process in which jax runs can hang.

    They do not hear Ctrl-C, which reaches them too: the process that waits for them ends them.
    """
    import multiprocess
    from multiprocess.context import SpawnProcess

    def start_deaf(process: Any) -> Any:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    before, start = multiprocess.get_start_method(allow_none=True), SpawnProcess._Popen
    multiprocess.set_start_method("spawn", force=True)
    SpawnProcess._Popen = staticmethod(start_deaf)
    try:
        yield
    finally:
        SpawnProcess._Popen = staticmethod(start)
        multiprocess.set_start_method(before, force=True)


def check_ids(dataset: datasets.Dataset, *, vocab_size: int, column: str = "input_ids") -> None:
    """Refuse ids that a model of `vocab_size` tokens has no embedding for; on a device they would become NaN."""
    row = 0
    for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        values = flat_values(table[column])
        wrong = np.flatnonzero((values < 0) | (values >= vocab_size))
        if wrong.size:
            ends = np.cumsum(pc.list_value_length(table[column]).to_numpy())
            inside = int(np.searchsorted(ends, wrong[0], side="right"))
            position = int(wrong[0] - (ends[inside - 1] if inside else 0))
            raise DataError(
                f"Row {row + inside} has id {values[wrong[0]]} at position {position}, beyond the model's vocabulary "
                f"of {vocab_size}: take the tokenizer that belongs to the model, or a config with a larger vocab_size."
            )
        row += len(table)
