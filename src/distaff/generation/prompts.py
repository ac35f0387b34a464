"""Prompts and sources on the host: what the caller gave, checked, and the padded arrays that programs take."""

from typing import Any

import numpy as np

from distaff.core.errors import DataError
from distaff.generation.options import Options


def read_rows(input_ids: Any, attention_mask: Any, options: Options, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and a boolean mask, both `[batch, width]`, of ids `[batch, width]` or of rows of different lengths.

    Rows of different lengths are padded on the left. Without a mask, pad tokens are left out unless they also end
    sequences. Raises `DataError` for empty input, rows without a token and ids outside the vocabulary.
    """
    ragged = isinstance(input_ids, (list, tuple)) and len({np.size(row) for row in input_ids}) > 1
    if ragged and attention_mask is None:
        ids, mask = left_padded([np.asarray(row).reshape(-1) for row in input_ids], options.filling or 0)
    else:
        ids = np.asarray(input_ids)
        if ids.ndim != 2:
            raise DataError(f"input_ids is {list(ids.shape)} and must be [batch, length]: as in input_ids[None].")
        mask = _mask(ids, attention_mask, options)
    if ids.size == 0:
        raise DataError(f"input_ids is {list(ids.shape)}: a prompt needs at least one token, such as the bos token.")
    if not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"input_ids must be whole numbers, not {ids.dtype}: pass the tokenizer's ids.")
    if not mask.any(axis=1).all():
        row = int(np.flatnonzero(~mask.any(axis=1))[0])
        raise DataError(f"Row {row} of input_ids holds padding alone: leave it out, or give it the bos token.")
    outside = mask & ((ids < 0) | (ids >= vocab))
    if outside.any():
        row, column = map(int, np.argwhere(outside)[0])
        raise DataError(
            f"input_ids[{row}, {column}] is {int(ids[row, column])}, and vocab_size is {vocab}: {int(outside.sum())} "
            "such ids; does the tokenizer belong to this model?"
        )
    return ids.astype(np.int32), mask


def _mask(ids: np.ndarray, attention_mask: Any, options: Options) -> np.ndarray:
    if attention_mask is not None:
        mask = np.asarray(attention_mask) != 0
        if mask.shape != ids.shape:
            raise DataError(
                f"attention_mask is {list(mask.shape)} and input_ids {list(ids.shape)}: give both one shape."
            )
        return mask
    pad = options.pad_token_id
    if pad is None or pad in options.eos_ids:
        return np.ones(ids.shape, bool)
    return ids != pad


def tokens_of(ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return each row's tokens without padding."""
    return [row[kept] for row, kept in zip(ids, mask)]


def left_padded(rows: list[np.ndarray], filling: int, width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask `[batch, width]` with the rows at the right end; `width` is at least the longest."""
    width = max(width, *(len(row) for row in rows))
    ids, mask = np.full((len(rows), width), filling), np.zeros((len(rows), width), bool)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = True
    return ids, mask


def right_padded(ids: np.ndarray, mask: np.ndarray, filling: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask `[batch, length]` widened to `width`; what is hidden is `filling`."""
    wider = ((0, 0), (0, width - ids.shape[1]))
    return np.pad(np.where(mask, ids, filling), wider, constant_values=filling), np.pad(mask, wider)


def row_bucket(rows: int) -> int:
    """Return how many rows a program has: a power of two up to 8, multiples of 8 above."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def filled_up(array: np.ndarray, rows: int) -> np.ndarray:
    """Return `[rows, ...]`: the array, and copies of its first row."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])
