"""Pairs of texts, a source and the target to write for it: read from files or the Hub, tokenised, put into batches.

What is blank: a row without both texts is left out and counted, as blank lines are. A row without one of them is
refused with its place (`blank="refuse"`), or left out and counted too ("skip"). With "keep" every row stays, blank
texts as empty ones, so that the n-th prediction belongs to the n-th row.
"""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.arrow import record_batches, replacing, strings, write_table
from distaff.data.columns import pad_rows
from distaff.data.encode import encode_texts, tokenizer_identity
from distaff.data.files import READERS, ReadCount, expand_files, place_word
from distaff.data.text import map_texts

logger = logging.getLogger(__name__)

Blank = Literal["refuse", "skip", "keep"]
Pair = tuple[str, str | None]

# Goes into the names of cached files: raise it when what they hold changes.
_FORMAT = 2


@dataclass(frozen=True)
class PairColumns:
    """Where source and target stand.

    source, target: columns, or keys of the objects in the column `nested` (the "translation" of Hub sets), which may be
    called by what stands before a "_" (en_XX, en). Without a name: the first of the `usual` names that there is, or
    else the first columns of strings.
    flags: what names them on the command line. blank: see above. need_target: whether a target must be there at all.
    """

    source: str | None
    target: str | None
    flags: tuple[str, str]
    usual: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    nested: str | None = None
    blank: Blank = "refuse"
    need_target: bool = True

    def select(self, record: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """Return the columns to read, seen on one record; raises `DataError` where there are none."""
        source, target = self._called(self.source, record), self._called(self.target, record)
        if self.nested is not None and source not in record and isinstance(record.get(self.nested), Mapping):
            return (self.nested,)
        texts = [name for name, value in record.items() if isinstance(value, str)]
        source = source or next((name for name in (*self.usual[0], *texts) if name in record), None)
        others = [name for name in (*self.usual[1], *texts) if name in record and name != source]
        target = target or next(iter(others), None)
        for name, flag in zip((source, target), self.flags):
            if name in record or (flag == self.flags[1] and not self.need_target):
                continue
            has = f"it has {listed(record) or 'none'}"
            if name:
                raise DataError(f"{where} has no column '{name}', which {flag} names: {has}.")
            raise DataError(f"{where} has no column of text for {flag}: {has}; name one.")
        return (str(source), str(target)) if target in record else (str(source),)

    def pair(self, columns: Sequence[str], values: Sequence[Any], place: str) -> Pair | None:
        """Return the two texts of a row, None for a row that is left out. Raises `DataError` for what cannot be."""
        if tuple(columns) == (self.nested,):
            values = self._inside(values[0], place)
        source, target = (*values, None)[:2]
        names = ("source", "target")
        for name, text in zip(names, (source, target)):
            if text is not None and not isinstance(text, str):
                raise DataError(
                    f"{place}: the {name} is of type {type(text).__name__} ({str(text)[:40]!r}), not a string."
                )
        has_target = len(values) > 1
        if self.blank == "keep":
            return source or "", (target or "") if has_target else None
        blank = [name for name, text in zip(names, values) if not (text and text.strip())]
        if not blank:
            return source, target
        if self.blank == "refuse" and len(blank) < len(values):
            raise DataError(
                f"{place}: the {blank[0]} is blank: correct the row, or leave such rows out with --skip_blank_pairs."
            )
        return None

    def _called(self, name: str | None, found: Collection[str]) -> str | None:
        """Return what the language `name` is called among those `found`."""
        short = (name or "").split("_")[0]
        return short if self.nested is not None and name not in found and short in found else name

    def _inside(self, value: Any, place: str) -> tuple[Any, ...]:
        """Return what the object of the nested column holds under the names of source and target."""
        keys = value if isinstance(value, Mapping) else {}
        names = [str(self._called(name, keys)) for name in (self.source, self.target)]
        if names[1] not in keys and not self.need_target:
            names.pop()
        if any(name not in keys for name in names):
            found = listed(keys) or type(value).__name__
            raise DataError(f"{place}: '{self.nested}' must hold {listed(names)}, and it holds {found}.")
        return tuple(keys[name] for name in names)


def load_pairs(
    columns: PairColumns,
    *,
    files: str | Sequence[str] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> datasets.Dataset:
    """Return a dataset with the columns "source" and "target", the latter null where a target need not be and is not.

    From `files` (.jsonl, .json, .csv, .parquet), converted once and cached by path, size and time of change, or from a
    split of a dataset of the Hub or of a folder that `save_to_disk` wrote.
    """
    if files:
        return _cached_files(expand_files(files), columns, cache_dir)
    if dataset_name is None:
        raise UsageError("There are no pairs to read: give files by --train_file, or --dataset_name.")
    from distaff.data.hub_text import load_split

    options: dict[str, Any] = {"config_name": dataset_config_name, "split": split, "cache_dir": cache_dir}
    return _hub_pairs(load_split(dataset_name, token=token, **options), columns, f"'{dataset_name}', split '{split}'")


def read_pairs(path: Path, columns: PairColumns, count: ReadCount) -> Iterator[Pair]:
    """Yield the pairs of a file; `count` is kept up to date on the way."""
    chosen: Sequence[str] = ()

    def select(record: Mapping[str, Any], place: str) -> Sequence[str]:
        nonlocal chosen
        chosen = columns.select(record, f"'{path}'")
        return chosen

    try:
        for row, values in READERS[path.suffix.lower()](path, select):
            pair = None if values is None else columns.pair(chosen, values, f"{path}, {place_word(path)} {row}")
            if pair is None:
                count.blank += 1
            else:
                count.texts += 1
                yield pair
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    if count.texts == 0:
        raise DataError(f"'{path}' has no pair of texts: {count.blank} blank rows and nothing else.")


_SCHEMA = pa.schema({"source": pa.string(), "target": pa.string()})


def _cached_files(paths: list[Path], columns: PairColumns, cache_dir: str | os.PathLike | None) -> datasets.Dataset:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.sha256(json.dumps([_FORMAT, stats, asdict(columns)]).encode()).hexdigest()[:20]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "distaff-pairs" / key
    target, counts_file = folder / "pairs.arrow", folder / "counts.json"
    if not counts_file.exists():
        counts = [ReadCount() for _ in paths]
        pairs = (pair for path, count in zip(paths, counts) for pair in read_pairs(path, columns, count))
        write_table(target, _SCHEMA, record_batches(pairs, _record_batch))
        # Written last: the cache is complete once it is there.
        with replacing(counts_file) as partial:
            partial.write_text(json.dumps([asdict(count) for count in counts]))
    for path, numbers in zip(paths, json.loads(counts_file.read_text())):
        logger.info("%s: %d pairs, %d blank rows left out.", path, numbers["texts"], numbers["blank"])
    return datasets.Dataset.from_file(str(target))


def _record_batch(pairs: list[Pair]) -> pa.RecordBatch:
    sources, targets = zip(*pairs)
    return pa.record_batch([strings(list(sources)), strings(list(targets))], schema=_SCHEMA)


def _hub_pairs(dataset: datasets.Dataset, columns: PairColumns, name: str) -> datasets.Dataset:
    def sample(kind: Any) -> Any:
        """Stand for a value of the feature `kind`."""
        if isinstance(kind, datasets.Translation | dict):
            return {}
        return "" if getattr(kind, "dtype", None) in ("string", "large_string") else 0

    chosen = columns.select({key: sample(kind) for key, kind in dataset.features.items()}, name)

    def pair(row: dict[str, Any], index: int) -> dict[str, Any]:
        found = columns.pair(chosen, [row[column] for column in chosen], f"{name}, row {index + 1}")
        source, target = found or ("", None)
        return {"source": source, "target": target, "kept": found is not None}

    text = datasets.Value("string")
    features = datasets.Features({"source": text, "target": text, "kept": datasets.Value("bool")})
    rows = dataset.select_columns(list(chosen)).map(
        pair, with_indices=True, remove_columns=list(chosen), features=features, desc="Reading pairs"
    )
    kept = rows.filter(bool, input_columns=["kept"]).remove_columns("kept")
    logger.info("%s: %d pairs, %d blank rows left out.", name, len(kept), len(rows) - len(kept))
    if len(kept) == 0:
        raise DataError(f"{name} has no pair of texts: {len(rows)} blank rows and nothing else.")
    return kept


# Ids.


def tokenize_pairs(
    dataset: datasets.Dataset,
    *,
    tokenizer: Any,
    max_source_length: int,
    max_target_length: int,
    prefix: str = "",
    num_proc: int | None = None,
    overwrite_cache: bool = False,
) -> datasets.Dataset:
    """Return `input_ids` of prefix and source, and `labels` of the target, each with the tokenizer's special tokens.

    Both are cut to their lengths, special tokens kept, and how many were is reported. Targets are tokenised in the
    tokenizer's target mode, where it has one (mBART's language tokens). Rows without target have no labels at all.
    """
    for name, length in (("max_source_length", max_source_length), ("max_target_length", max_target_length)):
        smallest = tokenizer.num_special_tokens_to_add(pair=False) + 1
        if length < smallest:
            raise UsageError(f"--{name} is {length}: this tokenizer needs {smallest} or more.")
    targets = dataset.data.column("target").null_count == 0
    ids, flag = datasets.List(datasets.Value("int32")), datasets.Value("bool")
    features = {"input_ids": ids, "source_cut": flag} | ({"labels": ids, "target_cut": flag} if targets else {})
    arguments = {
        "tokenizer": tokenizer,
        "max_source_length": max_source_length,
        "max_target_length": max_target_length,
        "prefix": prefix,
    }
    languages = [getattr(tokenizer, name, None) for name in ("src_lang", "tgt_lang")]
    rows = map_texts(
        dataset,
        _encode_pairs,
        inputs=["source", *(["target"] if targets else [])],
        arguments=arguments,
        features=features,
        depends=(_FORMAT, tokenizer_identity(tokenizer), max_source_length, max_target_length, prefix, languages),
        num_proc=num_proc,
        overwrite_cache=overwrite_cache,
    )
    cut = {name: int(np.sum(rows.data.column(name).to_numpy())) for name in features if name.endswith("cut")}
    logger.info(
        "%d pairs tokenised; %d sources were longer than %d tokens and %d targets longer than %d: they are cut.",
        len(rows),
        cut["source_cut"],
        max_source_length,
        cut.get("target_cut", 0),
        max_target_length,
    )
    return rows.remove_columns(list(cut))


def _encode_pairs(
    sources: list[str],
    targets: list[str] | None = None,
    *,
    tokenizer: Any,
    max_source_length: int,
    max_target_length: int,
    prefix: str,
) -> pa.Table:
    texts = [prefix + source for source in sources]
    table = encode_texts(texts, tokenizer=tokenizer, max_length=max_source_length, whole_word=False)
    columns = {"input_ids": table["input_ids"], "source_cut": table["cut"]}
    if targets is not None:
        with _target_mode(tokenizer):
            table = encode_texts(targets, tokenizer=tokenizer, max_length=max_target_length, whole_word=False)
        columns |= {"labels": table["input_ids"], "target_cut": table["cut"]}
    return pa.table(columns)


@contextmanager
def _target_mode(tokenizer: Any) -> Iterator[None]:
    if not hasattr(tokenizer, "_switch_to_target_mode"):
        yield
        return
    tokenizer._switch_to_target_mode()
    try:
        yield
    finally:
        tokenizer._switch_to_input_mode()


@dataclass(frozen=True)
class PairCollate:
    """Makes batches of tokenised pairs.

    Labels are padded with `pad_id` to `target_length`, and padding weighs nothing: told by position, never by id, for a
    text may hold any id.
    """

    pad_id: int
    target_length: int

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return `input_ids` and `attention_mask` [batch, length] int32, and where the rows have targets `labels`.

        `labels` [batch, target_length] int32 come with `label_weights` of the same shape, float32.
        """
        input_ids, attention_mask = pad_rows(rows["input_ids"], length=length, fill=self.pad_id)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if "labels" in rows.column_names:
            labels, present = pad_rows(rows["labels"], length=self.target_length, fill=self.pad_id)
            batch |= {"labels": labels, "label_weights": present.astype(np.float32) * weights[:, None]}
        return batch
