"""Texts out of .txt, .jsonl, .json, .csv, .tsv and .parquet files, one at a time, with the line of whatever is wrong.

The readers give the values of some columns; which ones, a `Select` decides, so that pairs of texts (`data/pairs.py`)
are read by the same code.
"""

import csv
import glob
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distaff.core.errors import DataError, UsageError, listed

# A row's place in the file, and what stands in the chosen columns; None for a line with nothing on it.
Row = tuple[int, tuple[Any, ...] | None]
# Returns the columns to read, seen on a record of the file and its place: the first record, or a header whose values
# are empty ones of the columns' types.
Select = Callable[[Mapping[str, Any], str], Sequence[str]]
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass
class ReadCount:
    """What reading a file came to."""

    texts: int = 0
    blank: int = 0


def expand_files(files: str | Sequence[str], *, suffixes: Collection[str] | None = None) -> list[Path]:
    """Return the files that names, comma lists and globs stand for, in order; each exists and holds something.

    They end in one of `suffixes`, by default in those that there are readers for.
    """
    names = [files] if isinstance(files, str) else list(files)
    paths: list[Path] = []
    for name in names:
        for part in [name] if _exists(Path(name)) else [part.strip() for part in name.split(",") if part.strip()]:
            path = Path(part).expanduser()
            if any(mark in part for mark in "*?[") and not _exists(path):
                found = sorted(glob.glob(str(path), recursive=True))
                if not found:
                    raise DataError(f"No file matches '{part}': check the pattern and the folder it starts from.")
                paths += map(Path, found)
            else:
                paths.append(path)
    if not paths:
        raise UsageError(f"'{files}' names no file: write names or patterns, with commas between them.")
    for path in paths:
        _check(path, READERS if suffixes is None else suffixes)
    return paths


def _exists(path: Path) -> bool:
    """Tell whether there is something called `path`; a text that cannot be a name is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _check(path: Path, suffixes: Collection[str]) -> None:
    if not _exists(path):
        raise DataError(f"There is no file '{path}': check its name and the folder that you are in.")
    if path.is_dir():
        raise DataError(f"'{path}' is a folder, not a file: name the files in it, as in '{path}/*.txt'.")
    if path.suffix.lower() not in suffixes:
        raise UsageError(
            f"'{path}' ends in '{path.suffix}', which is none of {listed(suffixes)}: convert or rename it."
        )
    if path.stat().st_size == 0:
        raise DataError(f"'{path}' is empty: it needs at least one line of text.")


def read_texts(path: Path, *, column: str | None = None, count: ReadCount | None = None) -> Iterator[str]:
    """Yield the texts of `path` that are not blank, unchanged; `count` is kept up to date on the way.

    In a .txt file each line is a text; "\\n", "\\r\\n" and "\\r" end a line, as in Python's own text files, and nothing
    else does (U+2028, U+0085 and form feeds stay inside). A byte order mark is left out. In the other formats the text
    is the column `column`, or "text", or else the first column of strings; null counts as blank.
    """
    count = ReadCount() if count is None else count

    def select(record: Mapping[str, Any], place: str) -> Sequence[str]:
        return (_choose(path, record, column),)

    try:
        for row, values in READERS[path.suffix.lower()](path, select):
            value = None if values is None else values[0]
            if value is None or (isinstance(value, str) and not value.strip()):
                count.blank += 1
            elif isinstance(value, str):
                count.texts += 1
                yield value
            else:
                raise DataError(
                    f"{path}, {place_word(path)} {row}: the text is of type {type(value).__name__} "
                    f"({str(value)[:40]!r}), not a string; correct the row or choose another --text_column."
                )
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    if count.texts == 0:
        raise DataError(f"'{path}' has no text: {count.blank} blank rows and nothing else.")


def place_word(path: Path) -> str:
    """Return what the readers count in `path`."""
    return "row" if path.suffix.lower() in (".parquet", ".json") else "line"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line with its ending), split at newline bytes only."""
    offset = 0
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: byte 0x{error.object[error.start]:02x} at offset {offset + error.start} "
                    "is not UTF-8; convert the file, for instance with 'iconv -t utf-8'."
                ) from error
            offset += len(raw)
            yield number, line


def _read_txt(path: Path, select: Select) -> Iterator[Row]:
    select({"text": ""}, "line 1")
    for number, line in read_lines(path):
        yield number, (line,)


def read_lines(path: Path, *, column: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield (number, line without its ending) of a .txt file, blank lines too; `column` may only be "text"."""
    _choose(path, {"text": ""}, column)
    number = 0
    for _, line in _lines(path):
        if "\r" not in line:
            number += 1
            yield number, line.removesuffix("\n")
            continue
        # io.StringIO translates "\r\n" and "\r" as open() does.
        for part in io.StringIO(line, newline=None):
            number += 1
            yield number, part.removesuffix("\n")


def _read_jsonl(path: Path, select: Select) -> Iterator[Row]:
    chosen: Sequence[str] = ()
    for number, line in _lines(path):
        if not line.strip():
            yield number, None
            continue
        record = _parse(line.rstrip(), path, first_line=number)
        chosen = chosen or select(_object(path, record, f"line {number}"), f"line {number}")
        yield number, _values(path, record, chosen, f"line {number}", escaped=_escaped(line))


def _parse(text: str, path: Path, *, first_line: int) -> Any:
    """Return what the JSON `text`, which begins in line `first_line`, holds."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {first_line + error.lineno - 1}: not valid JSON ({error.msg}, column {error.colno})."
        raise DataError(f"{path}, {place}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise DataError(f"{path}, line {first_line}: JSON that cannot be read ({error}).") from error


def _read_json(path: Path, select: Select) -> Iterator[Row]:
    """Read a list of objects, {"data": [objects]}, or objects line by line (told by the first line)."""
    first = next((line for _, line in _lines(path) if line.strip()), "null")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        record = None  # the first line is a part of something longer
    if isinstance(record, dict) and not isinstance(record.get("data"), list):
        yield from _read_jsonl(path, select)
        return
    text = "".join(line for _, line in _lines(path))
    records, escaped = _parse(text, path, first_line=1), _escaped(text)
    if isinstance(records, dict):
        records = records["data"] if isinstance(records.get("data"), list) else [records]
    if not isinstance(records, list):
        raise DataError(
            f"'{path}' holds a {type(records).__name__}: a list of objects is needed, or one object a line."
        )
    chosen: Sequence[str] = ()
    for number, record in enumerate(records, start=1):
        chosen = chosen or select(_object(path, record, f"row {number}"), f"row {number}")
        yield number, _values(path, record, chosen, f"row {number}", escaped=escaped)


def _read_tsv(path: Path, select: Select) -> Iterator[Row]:
    """Read fields between tabs, which may stand in quotes where the whole file is so; GLUE's own files know none."""
    quoting = csv.QUOTE_MINIMAL if _is_quoted(path) else csv.QUOTE_NONE
    yield from _read_csv(path, select, delimiter="\t", quoting=quoting)


def _is_quoted(path: Path) -> bool:
    """Tell whether fields stand in quotes: the file reads so, and its lines are no rows of their own without.

    A quote that begins one text and one that ends another would make a single row of all that is between them.
    """
    if not any(line.startswith('"') or '\t"' in line for _, line in _lines(path)):
        return False
    widths = Counter(line.count("\t") for _, line in _lines(path) if line.rstrip("\r\n"))
    try:
        rows = sum(map(bool, csv.reader((line for _, line in _lines(path)), delimiter="\t", strict=True)))
    except csv.Error:
        return False
    return len(widths) > 1 or rows == widths.total()


def _read_csv(path: Path, select: Select, **dialect: Any) -> Iterator[Row]:
    # The limit of the csv module, 128 kB a field, is one for the whole process; long texts need more.
    csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))
    reader = csv.reader((line for _, line in _lines(path)), strict=True, **dialect)
    try:
        header = next(reader, [])
        chosen = select(dict.fromkeys(header, ""), "line 1")
        if twice := [name for name in chosen if header.count(name) > 1]:
            raise DataError(f"{path}, line 1: {header.count(twice[0])} columns are called '{twice[0]}': rename them.")
        places = [header.index(name) for name in chosen]
        for fields in reader:
            if fields and len(fields) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields where the header has {len(header)}; "
                    "put texts that hold commas in quotes."
                )
            yield reader.line_num, tuple(fields[place] for place in places) if fields else None
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({error}).") from error


def _read_parquet(path: Path, select: Select, *, numbers: bool = False) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"'{path}' is not a Parquet file, or it was cut short.") from error
    with file:
        schema = file.schema_arrow
        record = {field.name: "" if _holds_strings(field.type) else 0 for field in schema}
        record |= {field.name: {} for field in schema if pa.types.is_struct(field.type)}
        chosen = select(record, "the schema")
        for name in chosen:
            if record[name] == 0 and not numbers:
                raise DataError(f"'{path}': column '{name}' is of type {schema.field(name).type}, not string.")
        row = 0
        for batch in file.iter_batches(batch_size=1000, columns=list(chosen)):
            columns = [batch.column(name).to_pylist() for name in chosen]
            for values in zip(*columns):
                row += 1
                yield row, values


def _holds_strings(kind: Any) -> bool:
    """Tell whether an Arrow type is one of strings, as they are or (pandas' categories) by number."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _choose(path: Path, record: Mapping[str, Any], column: str | None) -> str:
    """Return the name of the text column, seen on one record."""
    if column is not None:
        if path.suffix.lower() == ".txt" and column != "text":
            raise UsageError(f"'{path}' is plain text and has no column '{column}': leave --text_column out.")
        if column not in record:
            raise DataError(f"'{path}' has no column '{column}': it has {listed(record) or 'none'}.")
        return column
    names = ["text"] if "text" in record else [name for name, value in record.items() if isinstance(value, str)]
    if not names:
        raise DataError(
            f"'{path}' has no column of text: it has {listed(record) or 'none'}; name one by --text_column."
        )
    return names[0]


def _object(path: Path, record: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{path}, {place}: a {type(record).__name__} where an object with columns of text is needed.")
    return record


def _escaped(text: str) -> bool:
    """Tell whether JSON holds surrogates, of which half a pair is no character and cannot be written to a file."""
    return _SURROGATE.search(text) is not None


def _values(path: Path, record: Any, columns: Sequence[str], place: str, *, escaped: bool) -> tuple[Any, ...]:
    """Return the `columns` of a record; `escaped` tells whether the JSON that it is from holds surrogates."""
    record = _object(path, record, place)
    for column in columns:
        if column not in record:
            raise DataError(f"{path}, {place}: no column '{column}', only {listed(record) or 'an empty object'}.")
    values = tuple(record[column] for column in columns)
    if escaped:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path}, {place}: half of a surrogate pair ({error.object[error.start]!r}), which is no character: "
                "write characters beyond \\uffff as pairs, or as themselves."
            ) from error
    return values


READERS: dict[str, Callable[[Path, Select], Iterator[Row]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
# Those of rows in which columns of numbers may be chosen too.
TABLE_READERS: dict[str, Callable[[Path, Select], Iterator[Row]]] = {
    **READERS,
    ".parquet": partial(_read_parquet, numbers=True),
}
del TABLE_READERS[".txt"]
