"""One or two texts a row, with a class or a number: read from files or the Hub, tokenised, put into batches.

What is blank: a row without a text or label is refused with its place, or left out and counted (`skip_blank`). In rows
to predict for (`keep`) every row stays, blank texts as empty ones. Words such as "NA" and "null" are texts.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.arrow import record_batches, replacing, strings, write_table
from distaff.data.columns import pad_rows
from distaff.data.encode import tokenizer_identity
from distaff.data.files import TABLE_READERS, expand_files, place_word
from distaff.data.text import map_texts

logger = logging.getLogger(__name__)

# What the sets of GLUE and others call their texts; the first of these that are all there are taken.
USUAL_TEXTS = (
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("sentence",),
    ("text",),
)
USUAL_LABELS = ("label", "labels")
# Numbers of rows, which are no text.
_NUMBERS = ("idx", "id", "index")
# Goes into the names of cached files: raise it when what they hold changes.
_FORMAT = 2
_SCHEMA = pa.schema(
    {"text": pa.string(), "pair": pa.string(), "label": pa.string(), "file": pa.int32(), "row": pa.int64()}
)


@dataclass(frozen=True, kw_only=True)
class LabelledColumns:
    """Where texts and label stand.

    texts: one or two columns; None for what is usual, or the only one or two columns that are left. label: None for
    what is usual. need_label: whether there must be one. skip_blank, keep: see above.
    """

    texts: tuple[str, ...] | None = None
    label: str | None = None
    need_label: bool = True
    skip_blank: bool = False
    keep: bool = False

    def select(self, columns: Sequence[str], where: str) -> tuple[tuple[str, ...], str | None]:
        """Return the columns of the texts and of the label; raises `DataError` where there are none."""
        label = self.label or next((name for name in USUAL_LABELS if name in columns), None)
        if label not in columns and (self.need_label or (self.label is not None and not self.keep)):
            raise DataError(
                f"{where} has no column '{label or 'label'}' of labels: it has {listed(columns) or 'none'}; name it by "
                "--label_column_name."
            )
        label = label if label in columns else None
        texts = self.texts or next((names for names in USUAL_TEXTS if set(names) <= set(columns)), None)
        if texts is None:
            texts = tuple(name for name in columns if name != label and name not in _NUMBERS)
            if not 1 <= len(texts) <= 2:
                raise DataError(
                    f"{where} has the columns {listed(columns) or 'none'}: name one or two of texts by "
                    "--text_column_name, with a comma between them."
                )
        for name in texts:
            if name not in columns:
                raise DataError(f"{where} has no column '{name}': it has {listed(columns) or 'none'}.")
        return texts, label

    def row(self, texts: Sequence[Any], label: Any, place: str) -> tuple[str, str | None, str | None] | None:
        """Return two texts and the label of a row, None for one that is left out."""
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise DataError(f"{place}: a text is of type {type(text).__name__} ({str(text)[:40]!r}), not a string.")
        name = label_text(label, place)
        if self.keep:
            first, *second = (text or "" for text in texts)
            return first, second[0] if second else None, name
        blank = "text" if any(not (text and text.strip()) for text in texts) else "label" if name is None else None
        if blank is None:
            return texts[0], texts[1] if len(texts) > 1 else None, name
        if self.skip_blank:
            return None
        raise DataError(
            f"{place}: the {blank} is blank: correct the row, or leave such rows out with --skip_blank_rows."
        )


def label_text(label: Any, place: str) -> str | None:
    """Return a class or number as it is written, None for a blank one."""
    if isinstance(label, str):
        return label.strip() or None
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return None
    if isinstance(label, bool | int):
        return str(label)
    if isinstance(label, float):
        return repr(label)
    raise DataError(f"{place}: the label is of type {type(label).__name__}, neither a name nor a number.")


@dataclass(frozen=True)
class Labelled:
    """Rows with the columns "text", "pair" (null for single texts), "label" (null where absent), "file" and "row".

    sources: what "file" counts. names: of the classes in their order, where the source says it.
    """

    rows: datasets.Dataset
    sources: tuple[str, ...]
    names: tuple[str, ...] | None = None

    def place(self, index: int) -> str:
        """Return where row `index` comes from."""
        row = self.rows[index]
        return f"{self.sources[row['file']]} {row['row']}"

    def labels(self) -> list[str | None]:
        """Return the labels as they are written."""
        return self.rows.data.column("label").to_pylist() if self.rows._indices is None else self.rows["label"][:]

    def first(self, count: int | None) -> "Labelled":
        """Return at most `count` rows."""
        if count is None or count >= len(self.rows):
            return self
        return Labelled(self.rows.select(range(count)), self.sources, self.names)


def load_labelled(
    columns: LabelledColumns,
    *,
    files: str | Sequence[str] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> Labelled:
    """Return the rows of `files` (.jsonl, .json, .csv, .tsv, .parquet), or of a split of a dataset.

    Files are converted once and cached by path, size and time of change.
    """
    if files:
        return _from_files(expand_files(files), columns, cache_dir)
    if dataset_name is None:
        raise UsageError("There are no rows to read: give --train_file, --validation_file or --dataset_name.")
    from distaff.data.hub_text import load_split

    options: dict[str, Any] = {"config_name": dataset_config_name, "split": split, "cache_dir": cache_dir}
    return _from_split(load_split(dataset_name, token=token, **options), columns, f"'{dataset_name}', split '{split}',")


def _from_files(paths: list[Path], columns: LabelledColumns, cache_dir: str | os.PathLike | None) -> Labelled:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.sha256(json.dumps([_FORMAT, stats, asdict(columns)]).encode()).hexdigest()[:20]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "distaff-labelled" / key
    target, counts_file = folder / "rows.arrow", folder / "counts.json"
    if not counts_file.exists():
        counts = [[0, 0] for _ in paths]
        write_table(target, _SCHEMA, record_batches(_read_all(paths, columns, counts), _record_batch))
        # Written last: the cache is complete once it is there.
        with replacing(counts_file) as partial:
            partial.write_text(json.dumps(counts))
    for path, (kept, blank) in zip(paths, json.loads(counts_file.read_text())):
        logger.info("%s: %d rows, %d blank ones left out.", path, kept, blank)
    return Labelled(
        datasets.Dataset.from_file(str(target)), tuple(f"{path}, {place_word(path)}" for path in paths), None
    )


def _read_all(paths: list[Path], columns: LabelledColumns, counts: list[list[int]]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of the schema; `counts` [files][kept, blank] is kept up to date on the way."""
    widths: dict[int, Path] = {}
    for number, (path, count) in enumerate(zip(paths, counts)):
        chosen: list[Any] = []

        def select(record: Mapping[str, Any], place: str, path=path, chosen=chosen) -> Sequence[str]:
            texts, label = columns.select(list(record), f"'{path}'")
            chosen[:] = [len(texts), label]
            widths.setdefault(len(texts), path)
            return (*texts, label) if label is not None else texts

        if path.suffix.lower() == ".txt":
            raise UsageError(f"'{path}' is plain text: labels need columns, as in .csv, .tsv, .jsonl or .parquet.")
        try:
            for line, values in TABLE_READERS[path.suffix.lower()](path, select):
                row = None
                if values is not None:
                    label = values[-1] if chosen[1] is not None else None
                    row = columns.row(values[: chosen[0]], label, f"{path}, {place_word(path)} {line}")
                count[0 if row is not None else 1] += 1
                if row is not None:
                    yield (*row, number, line)
        except OSError as error:
            raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error
        if count[0] == 0:
            raise DataError(f"'{path}' has no row: {count[1]} blank ones and nothing else.")
    if len(widths) > 1:
        raise DataError(f"'{widths[1]}' has one text a row and '{widths[2]}' two: name columns by --text_column_name.")


def _record_batch(held: list[tuple[Any, ...]]) -> pa.RecordBatch:
    text, pair, label, file, number = zip(*held)
    return pa.record_batch(
        [strings(list(text)), strings(list(pair)), strings(list(label)), pa.array(file), pa.array(number)],
        schema=_SCHEMA,
    )


def _from_split(dataset: datasets.Dataset, columns: LabelledColumns, name: str) -> Labelled:
    texts, label = columns.select(list(dataset.features), name)
    kind = None if label is None else dataset.features[label]
    names = tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else None
    # So the numbers of GLUE's test sets are, which nobody tells; of classes each label says it by itself.
    secret = label is not None and names is None and not columns.need_label and set(dataset.unique(label)) == {-1}
    blank = 0

    def rows() -> Iterator[tuple[Any, ...]]:
        nonlocal blank
        for number, record in enumerate(dataset, start=1):
            value = None if label is None or secret else record[label]
            if names is not None:
                value = None if value is None or value < 0 else names[value]
            row = columns.row([record[text] for text in texts], value, f"{name} row {number}")
            blank += row is None
            if row is not None:
                yield (*row, 0, number)

    table = pa.Table.from_batches(record_batches(rows(), _record_batch), _SCHEMA)
    if len(table) == 0:
        raise DataError(f"{name} has no row: {blank} blank ones and nothing else.")
    logger.info("%s %d rows, %d blank ones left out.", name, len(table), blank)
    fingerprint = datasets.fingerprint.Hasher.hash((_FORMAT, dataset._fingerprint, asdict(columns)))
    found = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=fingerprint)
    return Labelled(found, (f"{name} row",), names)


# Ids.


def has_types(tokenizer: Any, config: Any) -> bool:
    """Tell whether the tokenizer says which text a token is of and a model with `config` reads it, as in PyTorch."""
    return "token_type_ids" in tokenizer.model_input_names and getattr(config, "type_vocab_size", 1) > 1


def tokenize_labelled(
    rows: datasets.Dataset,
    targets: np.ndarray,
    *,
    tokenizer: Any,
    max_length: int,
    types: bool,
    num_proc: int | None = None,
    overwrite_cache: bool = False,
) -> datasets.Dataset:
    """Return `input_ids`, with `types` `token_type_ids`, and `target`, of `targets` `[rows]`.

    Rows that are longer than `max_length` are cut as the tokenizer does it, the longer text first, and counted.
    """
    pairs = rows.data.column("pair").null_count == 0
    smallest = tokenizer.num_special_tokens_to_add(pair=pairs) + 1 + pairs
    if max_length < smallest:
        raise UsageError(f"--max_seq_length is {max_length}: this tokenizer needs {smallest} or more here.")
    ids = datasets.List(datasets.Value("int32"))
    encoded = map_texts(
        rows,
        _encode,
        inputs=["text", *(["pair"] if pairs else [])],
        arguments={"tokenizer": tokenizer, "max_length": max_length, "types": types},
        features={"input_ids": ids, **({"token_type_ids": ids} if types else {}), "cut": datasets.Value("bool")},
        depends=(_FORMAT, tokenizer_identity(tokenizer), max_length, types),
        num_proc=num_proc,
        overwrite_cache=overwrite_cache,
    )
    cut = int(np.sum(encoded.data.column("cut").to_numpy()))
    logger.info("%d rows tokenised; %d were longer than %d tokens and are cut.", len(encoded), cut, max_length)
    return encoded.remove_columns("cut").add_column("target", pa.array(targets))


def _encode(
    texts: list[str], pairs: list[str] | None = None, *, tokenizer: Any, max_length: int, types: bool
) -> pa.Table:
    names = ["input_ids", *(["token_type_ids"] if types else [])]
    options = {"return_attention_mask": False, "return_token_type_ids": types}
    found = tokenizer(texts, pairs, verbose=False, **options)
    cut = [len(row) > max_length for row in found["input_ids"]]
    if any(cut):
        found = tokenizer(texts, pairs, truncation=True, max_length=max_length, **options)
    columns = {name: pa.array(found[name], pa.list_(pa.int32())) for name in names}
    return pa.table({**columns, "cut": pa.array(cut)})


@dataclass(frozen=True)
class LabelledCollate:
    """Makes batches of tokenised rows, padded on the right with `pad_id`."""

    pad_id: int

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` and, where the rows have them, `token_type_ids` `[batch, length]` int32.

        `targets` `[batch]` are int32 classes or float32 numbers, `weights` `[batch]` float32.
        """
        input_ids, attention_mask = pad_rows(rows["input_ids"], length=length, fill=self.pad_id)
        targets = rows["target"].to_numpy()
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "targets": targets, "weights": weights}
        if "token_type_ids" in rows.column_names:
            batch["token_type_ids"], _ = pad_rows(rows["token_type_ids"], length=length, fill=0)
        return batch
