"""Batches of fixed shapes, each a pure function of (seed, step, process).

The order of an epoch is grain's shuffle, which finds the i-th row of epoch e without a permutation in memory; so there
is no position to save, and no row is dropped: the last batch of an epoch is filled up with a row of weight zero.
"""

from typing import Any, Protocol

import grain
import numpy as np

from distaff.core.errors import DataError, UsageError
from distaff.data.columns import row_lengths
from distaff.data.identity import content_mark, settings_of

# More lengths would save little padding, and each is a program to compile.
_BUCKETS = 4
_BUCKET_MULTIPLE = 8
# Batches whose rows are drawn together and sorted by length: enough for rows of like lengths to meet, few enough that
# an epoch stays mixed.
_WINDOW = 32


class Collate(Protocol):
    """Makes arrays out of rows of a dataset."""

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return arrays with one leading row for each of `rows`.

        Args:
            rows: the rows, as a `pyarrow.Table`.
            indices: [batch] int64, the rows' numbers in the dataset: what randomness of its own a row may have is a
                function of (seed, epoch, index).
            weights: [batch] float32, 0 for rows that only fill up the batch: they must not count anywhere.
            epoch: 1, 2, ... in training; always 0 in evaluation.
            length: what to pad to, or None where rows have no length.
        """
        ...


class Batches:
    """`batches(step)` returns the rows of this process of the global batch of a step.

    Args:
        dataset: a `datasets.Dataset`, or anything with a length that gives a `pyarrow.Table` for a list of row numbers
            under `with_format("arrow")`.
        collate: makes arrays out of rows.
        batch_size: rows of the global batch: per device * devices * accumulation.
        shuffle: True in training. Without it the rows come in order and `epoch` is always 0, so that what `collate`
            draws is fixed.
        max_length: the longest row, in tokens; None where rows have no length.
        pad_to_max_length: if not, the batch has the smallest of at most four lengths that its rows fit in.
        group_by_length: rows of similar lengths come together, so that few batches need the greatest length: of 32
            batches' rows in the epoch's order, sorted, and the batches shuffled. Without `shuffle` rows then come in
            another order; `indices` says in which.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        max_length: int | None = None,
        pad_to_max_length: bool = True,
        group_by_length: bool = False,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if len(dataset) == 0:
            raise DataError("The dataset has no rows: there is nothing to make batches of.")
        if batch_size < 1 or batch_size % process_count:
            raise UsageError(
                f"A batch of {batch_size} rows cannot be split over {process_count} process(es): "
                f"choose a positive multiple of {process_count}."
            )
        self.rows = len(dataset)
        self.batch_size = batch_size
        self.steps_per_epoch = -(-self.rows // batch_size)
        self._dataset = dataset.with_format("arrow")
        self._collate, self._seed = collate, seed
        # grain takes seeds of 32 bits.
        self._order = grain.MapDataset.range(self.rows).shuffle(seed=seed % 2**32).repeat() if shuffle else None
        self._local = slice(
            process_index * batch_size // process_count, (process_index + 1) * batch_size // process_count
        )
        self._max_length = max_length
        self._lengths: np.ndarray | None = None
        if max_length is not None and not pad_to_max_length:
            self._lengths = row_lengths(dataset)
            self.buckets = length_buckets(max_length)
        self._grouped = group_by_length and self._lengths is not None
        self._window: tuple[tuple[int, int], list[np.ndarray]] | None = None

    def epoch(self, step: int) -> float:
        """Return how many epochs the steps before `step` are."""
        return step / self.steps_per_epoch

    def identity(self) -> dict[str, Any]:
        """Return what the batches are a function of besides the step."""
        return {
            **settings_of(self._collate),
            "rows": self.rows,
            "content": content_mark(self._dataset, rows=self.rows),
            "batch_size": self.batch_size,
            "max_length": self._max_length,
            "seed": self._seed,
            **({"group_by_length": True} if self._grouped else {}),
        }

    def pad_to(self, indices: np.ndarray, weights: np.ndarray) -> int | None:
        """Return the `length` for `collate`, by the whole global batch, so that all processes choose alike."""
        if self._lengths is None:
            return self._max_length
        longest = int(self._lengths[indices].max())
        return next(bucket for bucket in self.buckets if bucket >= longest)

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows' numbers [batch_size] int64 of the global batch, and their weights [batch_size] float32."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._grouped:
            numbers = self._batches_of(epoch, place // _WINDOW)[place % _WINDOW]
        else:
            numbers = self._drawn(epoch, place * self.batch_size, self.batch_size)
        fill = self.batch_size - len(numbers)
        weights = np.repeat(np.array([1, 0], np.float32), [len(numbers), fill])
        return np.concatenate([numbers, np.repeat(numbers[:1], fill)]), weights

    def _drawn(self, epoch: int, start: int, count: int) -> np.ndarray:
        """Return the numbers of at most `count` rows from place `start` of an epoch on."""
        places = np.arange(start, min(start + count, self.rows), dtype=np.int64)
        if self._order is None:
            return places
        return np.array([self._order[epoch * self.rows + int(place)] for place in places], np.int64)

    def _batches_of(self, epoch: int, window: int) -> list[np.ndarray]:
        """Return the numbers of the rows of each batch of a window."""
        known = self._window  # read once: an evaluation asks from two threads
        if known is None or known[0] != (epoch, window):
            assert self._lengths is not None
            numbers = self._drawn(epoch, window * _WINDOW * self.batch_size, _WINDOW * self.batch_size)
            numbers = numbers[np.argsort(self._lengths[numbers], kind="stable")]
            batches = np.split(numbers, np.arange(self.batch_size, len(numbers), self.batch_size))
            if self._order is not None:
                mixed = np.random.default_rng([self._seed % 2**32, epoch, window]).permutation(len(batches))
                batches = [batches[index] for index in mixed]
            self._window = known = ((epoch, window), batches)
        return known[1]

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """Return what `collate` makes of this process's batch_size / process_count rows."""
        if step < 0:
            raise UsageError(f"There is no step {step}: steps count from 0.")
        indices, weights = self.indices(step)
        length = self.pad_to(indices, weights)
        local = indices[self._local]
        epoch = 0 if self._order is None else 1 + step // self.steps_per_epoch
        rows = self._dataset[local]
        return self._collate(rows, indices=local, weights=weights[self._local], epoch=epoch, length=length)


def length_buckets(max_length: int) -> tuple[int, ...]:
    """Return at most four lengths, about a quarter of `max_length` apart and multiples of 8, the last `max_length`."""
    step = _BUCKETS * _BUCKET_MULTIPLE
    bounds = {_BUCKET_MULTIPLE * -(-max_length * part // step) for part in range(1, _BUCKETS)}
    return (*sorted(bound for bound in bounds if bound < max_length), max_length)
