"""Several texts in a row, so that short ones are not padded to the limit.

A text attends to itself alone, its positions start anew, and a head reads its first token: a batch says and learns the
same as unpacked (Krell et al. 2021, https://arxiv.org/abs/2107.02027).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from distaff.data.batches import Batches
from distaff.data.columns import flat_values, list_lengths

# Shorter rows have gaps that no text fits in; longer ones cost more in attention than they save.
_ROW_TOKENS = 128
# A row holds at most one text for so many of its tokens.
_TOKENS_A_TEXT = 8
# Batches that are tried to see how many rows they need.
_TRIED = 64


def first_fit(lengths: np.ndarray, *, row_length: int, texts_a_row: int) -> np.ndarray:
    """Return the row [texts] int64 of each text of `lengths` [texts]: the longest first, each where it first fits."""
    rows = np.zeros(len(lengths), np.int64)
    room = np.full(len(lengths), row_length)
    left = np.full(len(lengths), texts_a_row)
    for index in np.argsort(-lengths, kind="stable"):
        rows[index] = row = np.argmax((room >= lengths[index]) & (left > 0))
        room[row] -= lengths[index]
        left[row] -= 1
    return rows


@dataclass(frozen=True)
class PackedCollate:
    """Makes packed rows of tokenised texts with a target each.

    pad_id: of what no text fills. first_position: of the first token of a text.
    """

    pad_id: int
    first_position: int
    row_length: int

    @property
    def texts_a_row(self) -> int:
        """How many texts a row holds at most."""
        return self.row_length // _TOKENS_A_TEXT

    def rows(self, lengths: np.ndarray) -> np.ndarray:
        """Return the row [texts] of each text of `lengths` [texts]."""
        return first_fit(lengths, row_length=self.row_length, texts_a_row=self.texts_a_row)

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return `length` packed rows of the texts of `rows` that have a weight.

        `input_ids`, `position_ids`, `segments` and, where the texts have them, `token_type_ids` are
        `[length, row_length]` int32; a segment is the number of a text in its row from 1 on, 0 where there is none.
        `first_tokens` int32, `targets` and `weights` are `[length, texts_a_row]`; the weight of no text is 0.
        """
        assert length is not None
        rows = rows.filter(weights > 0)
        lengths = list_lengths(rows["input_ids"])
        row = self.rows(lengths)
        earlier = np.tril(row[:, None] == row[None, :], k=-1)  # [texts, texts]: which stand before it in its row
        place, start = earlier.sum(axis=1), earlier @ lengths
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)

        def tokens(values: np.ndarray, fill: int = 0) -> np.ndarray:
            array = np.full((length, self.row_length), fill, np.int32)
            array[np.repeat(row, lengths), np.repeat(start, lengths) + within] = values
            return array

        def texts(values: np.ndarray) -> np.ndarray:
            array = np.zeros((length, self.texts_a_row), values.dtype)
            array[row, place] = values
            return array

        batch = {
            "input_ids": tokens(flat_values(rows["input_ids"]), self.pad_id),
            "position_ids": tokens(within + self.first_position),
            "segments": tokens(np.repeat(place + 1, lengths)),
            "first_tokens": texts(start.astype(np.int32)),
            "targets": texts(rows["target"].to_numpy()),
            "weights": texts(np.ones(len(lengths), np.float32)),
        }
        if "token_type_ids" in rows.column_names:
            batch["token_type_ids"] = tokens(flat_values(rows["token_type_ids"]))
        return batch


class PackedBatches(Batches):
    """Batches of `batch_size` texts in few rows: in the smallest of at most four numbers of rows that suffice.

    Args:
        pad_id, first_position: as for `PackedCollate`.
        max_length: the longest text, in tokens.
        multiple: what the rows of a batch must be a multiple of: devices * accumulation.
        process_count: by which `multiple` can be divided.
        options: the others of `Batches`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        pad_id: int,
        first_position: int,
        max_length: int,
        multiple: int = 1,
        process_count: int = 1,
        **options: Any,
    ):
        self._packer = PackedCollate(pad_id, first_position, max(_ROW_TOKENS, max_length))
        super().__init__(
            dataset,
            collate=self._packer,
            max_length=max_length,
            pad_to_max_length=False,
            process_count=process_count,
            **options,
        )
        self._processes = process_count
        steps = np.unique(np.linspace(0, self.steps_per_epoch - 1, _TRIED).astype(np.int64))
        tried = [self._rows_needed(*self.indices(int(step))) for step in steps]
        # The last number holds whatever comes: each text in a row of its own.
        wanted = [*np.quantile(tried, [0.5, 0.9, 1.0]), self.batch_size // process_count]
        local = multiple // process_count
        self.row_counts = tuple(sorted({local * int(-(-count // local)) for count in wanted}))

    def examples(self, batch: dict[str, np.ndarray]) -> int:
        """Return the texts in a batch."""
        return int(np.count_nonzero(batch["weights"]))

    def pad_to(self, indices: np.ndarray, weights: np.ndarray) -> int:
        """Return the rows that each process makes."""
        needed = self._rows_needed(indices, weights)
        return next(count for count in self.row_counts if count >= needed)

    def _rows_needed(self, indices: np.ndarray, weights: np.ndarray) -> int:
        """Return the most rows that a process needs for its share of a global batch."""
        assert self._lengths is not None
        shares = zip(np.split(self._lengths[indices], self._processes), np.split(weights, self._processes))
        return 1 + max(int(self._packer.rows(lengths[there > 0]).max(initial=0)) for lengths, there in shares)
