"""Sentences of words, with a tag for each: read from columns (CoNLL), from JSON or from the Hub.

In a file of columns a line is a word and what belongs to it, with tabs or spaces between, and a blank line ends a
sentence; lines of `-DOCSTART-` do so too. A JSON row holds a list of words and a list of tags. A row without words is
left out and counted, except in data to predict for, where the n-th answer belongs to the n-th row.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.arrow import record_batches, strings, write_table
from distaff.data.columns import flat_values
from distaff.data.files import READERS, ReadCount, expand_files, place_word, read_lines

logger = logging.getLogger(__name__)

COLUMN_FILES = (".conll", ".txt", ".tsv", ".bio", ".iob", ".iob2")
ROW_FILES = (".jsonl", ".json")
# Goes into the names of cached files: raise it when what they hold changes.
_FORMAT = 1


@dataclass(frozen=True)
class Sentence:
    """Words, their tags where there are any, and where they stand, for what is said of them."""

    words: list[str]
    tags: list[str] | None
    place: str


@dataclass(frozen=True)
class TagColumns:
    """Where words and tags stand.

    words, tags: names of columns, or their numbers (from 0) in files of columns, where by default the first and the
    last are read. In rows, words are by default "tokens", "words" or the first column of lists, tags "<task>_tags",
    "tags", "labels" or the second. need_tags: whether tags must be there. keep_blank: keep rows without words.
    """

    words: str | None = None
    tags: str | None = None
    task: str = "ner"
    need_tags: bool = True
    keep_blank: bool = False

    def select(self, record: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """Return the columns to read, seen on one record; raises `DataError` where there are none."""
        lists = [name for name, value in record.items() if isinstance(value, list)]
        has, called = f"it has {listed(record) or 'none'}", "no column '{}'"
        words = self.words or next((name for name in ("tokens", "words", *lists) if name in record), "")
        if words not in record:
            raise DataError(f"{where} has {called.format(words) if words else 'no column of words'}: {has}.")
        usual = (f"{self.task}_tags", "tags", "labels", *lists)
        tags = self.tags or next((name for name in usual if name in record and name != words), None)
        if tags in record:
            return words, str(tags)
        if self.need_tags or self.tags:
            what = called.format(tags) if tags else "no column of tags"
            raise DataError(f"{where} has {what}: {has}; name one by --label_column_name.")
        return (words,)


def load_sentences(
    columns: TagColumns,
    *,
    files: str | Sequence[str] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> datasets.Dataset:
    """Return a dataset of "words" and "tags", lists of strings, and "place"; tags are null where there are none.

    From `files`, converted once and cached by path, size and time of change, or from a split of a dataset of the Hub or
    of a folder that `save_to_disk` wrote.
    """
    if files:
        paths = expand_files(files, suffixes=(*COLUMN_FILES, *ROW_FILES))
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        key, found = json.dumps([_FORMAT, stats, asdict(columns)]), _of_files(paths, columns)
    elif dataset_name is None:
        raise UsageError("There are no sentences to read: give --train_file, --validation_file or --dataset_name.")
    else:
        from distaff.data.hub_text import load_split

        options: dict[str, Any] = {"config_name": dataset_config_name, "split": split, "cache_dir": cache_dir}
        dataset = load_split(dataset_name, token=token, **options)
        key = json.dumps([_FORMAT, dataset._fingerprint, asdict(columns)])
        found = _of_dataset(dataset, columns, f"'{dataset_name}', split '{split}'")
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "distaff-sentences"
    target = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.arrow"
    if not target.exists():
        write_table(target, _SCHEMA, record_batches(found, _record_batch))
    return datasets.Dataset.from_file(str(target))


# Reading.


def read_sentences(path: Path, columns: TagColumns) -> Iterator[Sentence]:
    """Yield the sentences of a file. Raises `DataError` for one without any."""
    count = ReadCount()
    read = _read_columns if path.suffix.lower() in COLUMN_FILES else _read_rows
    try:
        for sentence in read(path, columns):
            if not sentence.words:
                count.blank += 1
            if sentence.words or columns.keep_blank:
                count.texts += 1
                yield sentence
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    if count.texts == 0:
        raise DataError(f"'{path}' has no sentence: {count.blank} blank rows and nothing else.")
    if columns.keep_blank:
        logger.info("%s: %d sentences.", path, count.texts)
    else:
        logger.info("%s: %d sentences, %d blank rows left out.", path, count.texts, count.blank)


def _read_columns(path: Path, columns: TagColumns) -> Iterator[Sentence]:
    held: list[tuple[str, ...]] = []
    chosen: tuple[int, ...] = ()
    width, seen, start = 0, 0, 0
    for number, line in read_lines(path):
        fields = _fields(line)
        if not fields or fields[0] == "-DOCSTART-":
            if held:
                yield _sentence(held, f"{path}, line {start}")
            held = []
            continue
        if not width:
            width, seen = len(fields), number
            chosen = _chosen(path, columns, width)
        if len(fields) != width:
            raise DataError(
                f"{path}, line {number}: {len(fields)} column(s) where line {seen} has {width}; a word and its tag "
                "stand on one line, with a tab or spaces between."
            )
        start = start if held else number
        held.append(tuple(fields[place] for place in chosen))
        if len(chosen) > 1 and not held[-1][1]:
            raise DataError(f"{path}, line {number}: the word {held[-1][0]!r} has no tag: write one, such as O.")
    if held:
        yield _sentence(held, f"{path}, line {start}")


def _fields(line: str) -> list[str]:
    """Return the columns of a line, none for a blank one; other spaces than the plain one are part of a word."""
    if not line.strip(" \t"):
        return []
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def _sentence(held: list[tuple[str, ...]], place: str) -> Sentence:
    words, *tags = map(list, zip(*held))
    return Sentence(words, tags[0] if tags else None, place)


def _chosen(path: Path, columns: TagColumns, width: int) -> tuple[int, ...]:
    """Return the numbers of the columns of words and tags."""
    found: list[int | None] = []
    for name, flag in ((columns.words, "text"), (columns.tags, "label")):
        if name is not None and not (name.isdecimal() and int(name) < width):
            raise UsageError(
                f"'{path}' has columns without names: --{flag}_column_name must be a number from 0 to {width - 1}."
            )
        found.append(None if name is None else int(name))
    words, tags = found[0] or 0, found[1]
    if tags is None and width > 2 and columns.task != "ner":
        raise UsageError(
            f"'{path}' has {width} columns: say which one holds the tags of '{columns.task}' by --label_column_name."
        )
    tags = width - 1 if tags is None else tags
    if tags != words:
        return words, tags
    if columns.need_tags:
        raise DataError(f"'{path}' has words and no tags: write the tag of each word behind it, after a tab.")
    return (words,)


def _read_rows(path: Path, columns: TagColumns) -> Iterator[Sentence]:
    names: Sequence[str] = ()

    def select(record: Mapping[str, Any], place: str) -> Sequence[str]:
        nonlocal names
        names = columns.select(record, f"'{path}'")
        return names

    for row, values in READERS[path.suffix.lower()](path, select):
        place = f"{path}, {place_word(path)} {row}"
        if values is not None:
            yield _row(values, names, place, columns)


def _row(values: Sequence[Any], names: Sequence[str], place: str, columns: TagColumns) -> Sentence:
    """Return the sentence of a row. Raises `DataError` for what is none."""
    lists: list[list[Any]] = []
    for name, value in zip(names, values):
        if not isinstance(value, list | None):
            raise DataError(f"{place}: '{name}' is of type {type(value).__name__} and must be a list.")
        lists.append(value or [])
    words, tags = lists[0], lists[1] if len(lists) > 1 else None
    wrong = next((word for word in words if not isinstance(word, str)), None)
    if wrong is not None or None in words:
        raise DataError(f"{place}: '{names[0]}' holds {wrong!r}, which is no word: write it in quotes.")
    if tags is None or (values[1] is None and not columns.need_tags):
        return Sentence(words, None, place)
    if len(words) != len(tags):
        raise DataError(f"{place}: {len(words)} words and {len(tags)} tags: each word needs one.")
    for word, tag in zip(words, tags):
        if isinstance(tag, bool) or not isinstance(tag, str | int) or tag == "":
            raise DataError(f"{place}: the tag of {word!r} is {tag!r}: write a name, such as 'O', or a number.")
    return Sentence(words, [str(tag) for tag in tags], place)


def _of_files(paths: list[Path], columns: TagColumns) -> Iterator[Sentence]:
    for path in paths:
        yield from read_sentences(path, columns)


def _of_dataset(dataset: datasets.Dataset, columns: TagColumns, name: str) -> Iterator[Sentence]:
    def inner(feature: Any) -> Any:
        return getattr(feature, "feature", None)

    sample = {key: [] if inner(feature) is not None else "" for key, feature in dataset.features.items()}
    chosen = columns.select(sample, name)
    names = [getattr(inner(dataset.features[column]), "names", None) for column in chosen]
    kept = 0
    for row, record in enumerate(dataset.select_columns(list(chosen)), start=1):
        place = f"{name}, row {row}"
        values = [record[column] for column in chosen]
        if names[-1] and len(chosen) > 1:
            # -1 stands in the test sets of the Hub whose tags are not public.
            secret = not columns.need_tags and set(values[1] or []) == {-1}
            values[1] = None if secret else [_named(tag, names[-1], place) for tag in values[1] or []]
        sentence = _row(values, chosen, place, columns)
        if sentence.words or columns.keep_blank:
            kept += 1
            yield sentence
    if kept == 0:
        raise DataError(f"{name} has no sentence: {len(dataset)} blank rows and nothing else.")
    logger.info("%s: %d sentences, %d blank rows left out.", name, kept, len(dataset) - kept)


def _named(number: int, names: list[str], place: str) -> str:
    if not 0 <= number < len(names):
        raise DataError(f"{place}: the tag {number} has no name among the {len(names)} of the dataset.")
    return names[number]


_WORDS = pa.list_(pa.string())
_SCHEMA = pa.schema({"words": _WORDS, "tags": _WORDS, "place": pa.string()})


def _record_batch(held: list[Sentence]) -> pa.RecordBatch:
    ends = np.cumsum([0, *(len(sentence.words) for sentence in held)], dtype=np.int32)
    words = strings([word for sentence in held for word in sentence.words])
    tags = pa.array([sentence.tags for sentence in held], _WORDS)
    places = pa.array([sentence.place for sentence in held], pa.string())
    return pa.record_batch([pa.ListArray.from_arrays(pa.array(ends), words), tags, places], schema=_SCHEMA)


# Labels.


def labels_of(dataset: datasets.Dataset) -> list[str]:
    """Return the tags that occur, sorted."""
    return sorted(set(flat_values(dataset.data.column("tags"))))


def check_tags(dataset: datasets.Dataset, labels: Sequence[str]) -> None:
    """Raise `DataError` for the first tag that is none of `labels`, with its place."""
    known = set(labels)
    if set(flat_values(dataset.data.column("tags"))) <= known:
        return
    for row in dataset:
        for number, (word, tag) in enumerate(zip(row["words"], row["tags"] or []), start=1):
            if tag in known:
                continue
            kind = tag.partition("-")[2]
            like = [label for label in labels if kind and label.partition("-")[2] == kind]
            hint = f"'{kind}' is known as {listed(like)}, so the scheme is another one: convert it" if like else ""
            raise DataError(
                f"{row['place']}, word {number} ({word!r}): the tag '{tag}' is none of the model's {len(labels)} "
                f"({listed(labels)}): {hint or 'correct it, or train with data that has it'}."
            )
