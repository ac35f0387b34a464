"""Arrow columns of lists as NumPy arrays."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distaff.core.errors import DataError


def row_lengths(dataset: Any, *, column: str = "input_ids") -> np.ndarray:
    """Return the length [rows] int32 of each row's list in `column`."""
    parts = [list_lengths(table[column]) for table in dataset.with_format("arrow").iter(batch_size=10_000)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def list_lengths(column: Any) -> np.ndarray:
    """Return the length [rows] int32 of each list of `column`."""
    return pc.list_value_length(column).to_numpy().astype(np.int32)


def flat_values(column: Any) -> np.ndarray:
    """Return the values of a column of lists, one after another."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.flatten().to_numpy(zero_copy_only=False)


def pad_rows(column: Any, *, length: int | None, fill: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lists of integers of `column` padded on the right, and where they are; both [batch, length] int32.

    Without `length` the longest row decides.
    """
    lengths = list_lengths(column)
    longest = int(lengths.max(initial=0))
    length = longest if length is None else length
    if longest > length:
        raise DataError(f"A row has {longest} tokens where at most {length} are allowed: tokenise with this limit.")
    present = np.arange(length, dtype=np.int32)[None, :] < lengths[:, None]
    padded = np.full(present.shape, fill, np.int32)
    padded[present] = flat_values(column)
    return padded, present.astype(np.int32)
