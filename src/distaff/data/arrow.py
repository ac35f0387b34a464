"""Arrow files that are written whole or not at all."""

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from distaff.core.errors import DataError

Row = TypeVar("Row")

# Rows that are converted together.
_BATCH_ROWS = 1000


def record_batches(rows: Iterable[Row], make: Callable[[list[Row]], pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield what `make` makes of a thousand rows at a time."""
    rows = iter(rows)
    while held := list(islice(rows, _BATCH_ROWS)):
        yield make(held)


def strings(texts: list[str]) -> pa.Array:
    """Return an array of `texts`. Raises `DataError` for half of a surrogate pair."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError as error:
        raise DataError(
            f"A text holds half of a surrogate pair ({str(error.object)[:40]!r}), which is no character: "
            "write characters beyond \\uffff as pairs, or as themselves."
        ) from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a name to write to that becomes `target` when all went well, so that nothing half-written is ever found."""
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise DataError(
            f"The cache '{target.parent}' cannot be written ({error.strerror}): set HF_HOME to a folder that can."
        ) from error
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_table(target: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write `batches` to `target`, whole or not at all."""
    with (
        replacing(target) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
