"""Batches from texts that are read as they come, with a position that is saved and resumed exactly.

texts -> tokens with their special tokens -> joined, cut into blocks -> shuffled in windows -> batches. The shuffle is
our own: a window is read, permuted by (seed, number of the window) and used up. So the position is where the window
begins and how many of its blocks are used, and a resume reads one window again; a shuffle buffer, which is refilled all
the time, would have to be saved whole. A window ends where the texts end, so epochs do not mix.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.distributed import split_dataset_by_node

from distaff.core.errors import CheckpointError, DataError, UsageError
from distaff.data.batches import Collate
from distaff.data.columns import flat_values
from distaff.data.draws import row_keys, uniforms
from distaff.data.encode import encode_texts, tokenizer_identity
from distaff.data.identity import mark, settings_of
from distaff.data.text import check_ids, tokenize_blocks

logger = logging.getLogger(__name__)

# Texts tokenised at once: enough for the tokenizer's threads, few enough that reading them again costs nothing.
_TEXTS = 64
# States of the latest steps that are kept, because a loop that reads ahead saves the state of an earlier step.
_KEPT_STATES = 64


@dataclass
class _Position:
    """Where a window begins: the text after it, and what is left of the tokens before it."""

    epoch: int = 0  # how often the texts were begun again
    source: dict[str, Any] | None = None  # the state of the `datasets` stream before its next `_TEXTS` texts
    left: dict[str, list[int]] = field(default_factory=dict)  # tokens before these texts, less than a block
    skip: int = 0  # blocks made of both that lie before the window
    tokens: int = 0  # tokens read in this epoch, up to here


class TextStream:
    """`stream(step)` returns the next batch; steps come in order.

    The first `num_eval_samples` texts are `evaluation` and never come in training, in no epoch. At the end of the
    texts reading goes on at the beginning, and tokens that do not fill a block there go in front of those of the next
    epoch. The texts are dealt out to the processes by `datasets.distributed.split_dataset_by_node`: each process has a
    state of its own.

    Args:
        texts: a `datasets.IterableDataset` with the column "text", as `load_texts(streaming=True)` returns it.
        collate: as for `Batches`; its rows have `input_ids` (and `word_start`), its `index` is the block's number.
        batch_size: rows of the global batch.
        window: blocks that are shuffled together.
        vocab_size: of the model; ids beyond it are refused.
    """

    def __init__(
        self,
        texts: datasets.IterableDataset,
        *,
        tokenizer: Any,
        collate: Collate,
        block: int,
        batch_size: int,
        vocab_size: int,
        num_eval_samples: int = 0,
        window: int = 1000,
        seed: int = 0,
        whole_word: bool = False,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if batch_size < 1 or batch_size % process_count:
            raise UsageError(
                f"A batch of {batch_size} rows cannot be split over {process_count} process(es): "
                f"choose a positive multiple of {process_count}."
            )
        if window < 1 or block < 1 or num_eval_samples < 0:
            raise UsageError(
                f"A stream needs a window and blocks of at least 1 and no negative number of evaluation texts, "
                f"not {window}, {block} and {num_eval_samples}."
            )
        self.batch_size = batch_size
        self._tokenizer, self._collate, self._block, self._vocab_size = tokenizer, collate, block, vocab_size
        self._window, self._seed, self._whole_word = window, seed, whole_word
        self._process_index, self._process_count = process_index, process_count
        first = list(itertools.islice(_texts_of(texts), max(num_eval_samples, 1)))
        self._content, self._held_out = mark(first), first[:num_eval_samples]
        if len(self._held_out) < num_eval_samples:
            raise DataError(
                f"The stream has only {len(self._held_out)} texts, and --num_eval_samples takes the first "
                f"{num_eval_samples}: lower it."
            )
        self._source, self._excluded = self._training_texts(texts)
        self._beginning = self._source.state_dict()
        self._begin(_Position(), window=0, first=0, offset=0, step=0, epoch=0)

    def _training_texts(self, texts: datasets.IterableDataset) -> tuple[datasets.IterableDataset, frozenset[str]]:
        """Return this process's texts, and those that must be left out of them one by one."""
        count, index = self._process_count, self._process_index
        if count > 1 and texts.num_shards % count == 0:
            # Whole shards go to a process, which cannot know where the first texts of the whole stream ended up.
            return split_dataset_by_node(texts, rank=index, world_size=count), frozenset(self._held_out)
        rest = texts.skip(len(self._held_out)) if self._held_out else texts
        return (split_dataset_by_node(rest, rank=index, world_size=count) if count > 1 else rest), frozenset()

    def evaluation(self) -> datasets.Dataset:
        """Return the evaluation texts as blocks, for `Batches(..., shuffle=False)`; the same in all processes."""
        if not self._held_out:
            raise UsageError("No texts are held out: give --num_eval_samples.")
        held_out = datasets.Dataset.from_dict({"text": self._held_out})
        blocks = tokenize_blocks(held_out, tokenizer=self._tokenizer, block=self._block, whole_word=self._whole_word)
        check_ids(blocks, vocab_size=self._vocab_size)
        return blocks

    def identity(self) -> dict[str, Any]:
        """Return what the batches are a function of besides the step and the texts after the first ones."""
        return {
            **settings_of(self._collate),
            "tokenizer": mark(tokenizer_identity(self._tokenizer)),
            "content": self._content,
            "batch_size": self.batch_size,
        }

    def epoch(self, step: int) -> float:
        """Return how often the texts had been begun again by the batch before `step`."""
        return float(self.state_dict(step)["epoch"])

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """Return what `collate` makes of the next batch_size / process_count blocks; `step` must be the next one."""
        if step != self._step:
            raise UsageError(f"A stream gives its batches in order: step {self._step} is next, not {step}.")
        blocks, epochs, numbers = zip(*(self._next_block() for _ in range(self.batch_size // self._process_count)))
        columns = {name: np.stack([block[name] for block in blocks]) for name in blocks[0]}  # [batch, block]
        rows = pa.table(
            {name: pa.FixedSizeListArray.from_arrays(values.ravel(), self._block) for name, values in columns.items()}
        )
        # Numbers of different processes must differ, because the masks are drawn by them.
        indices = np.array(numbers, np.int64) * self._process_count + self._process_index
        self._step += 1
        self._remember(max(epochs))
        weights = np.ones(len(blocks), np.float32)
        return self._collate(rows, indices=indices, weights=weights, epoch=1, length=self._block)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position before the batch of `step` (the next one by default), ready for JSON.

        The latest 64 steps can be asked for, so that a loop that reads ahead can save the step it is at.
        """
        step = self._step if step is None else step
        if step not in self._states:
            raise UsageError(f"The position at step {step} is not kept any more: the next step is {self._step}.")
        return self._states[step]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` returned, with the same settings and as many processes."""
        settings = self._settings()
        if state["settings"] != settings:
            raise CheckpointError(
                f"The stream was saved with {state['settings']} and now has {settings}: resume with the same settings."
            )
        counts = {name: state[name] for name in ("window", "first", "offset", "step", "epoch")}
        self._begin(_Position(**state["position"]), **counts)

    def _settings(self) -> dict[str, int]:
        return {
            "block": self._block,
            "window": self._window,
            "seed": self._seed,
            "num_eval_samples": len(self._held_out),
            "process_index": self._process_index,
            "process_count": self._process_count,
        }

    def _begin(self, position: _Position, *, window: int, first: int, offset: int, step: int, epoch: int) -> None:
        """Go to the window `window`, whose blocks count from `first`, `offset` of them used. Nothing is read yet."""
        self._reader = self._read_blocks(position)
        self._position = self._next_position = position
        self._number, self._first, self._offset, self._step = window, first, offset, step
        self._blocks: list[dict[str, np.ndarray]] = []
        self._order = np.zeros(0, np.int64)
        self._states: dict[int, dict[str, Any]] = {}
        self._remember(epoch)

    def _fill_window(self) -> None:
        """Read the blocks of the window that `_position` stands before."""
        self._position = self._next_position
        self._blocks = []
        while len(self._blocks) < self._window:
            block, self._next_position = next(self._reader)
            if block is not None:
                self._blocks.append(block)
            elif self._blocks:
                break  # the end of the texts
            else:
                self._position = self._next_position
        self._order = np.argsort(
            uniforms(row_keys(self._seed, self._number), len(self._blocks), draw=0)[0], kind="stable"
        )

    def _next_block(self) -> tuple[dict[str, np.ndarray], int, int]:
        """Return the next block, its epoch, and its number in this process."""
        if not self._blocks:
            self._fill_window()
        if self._offset == len(self._blocks):
            self._number, self._first, self._offset = self._number + 1, self._first + len(self._blocks), 0
            self._fill_window()
        place = int(self._order[self._offset])
        self._offset += 1
        return self._blocks[place], self._position.epoch, self._first + place

    def _remember(self, epoch: int) -> None:
        self._states[self._step] = {
            "step": self._step,
            "epoch": epoch,
            "position": vars(self._position),
            "window": self._number,
            "first": self._first,
            "offset": self._offset,
            "settings": self._settings(),
        }
        self._states.pop(self._step - _KEPT_STATES, None)

    def _read_blocks(self, start: _Position) -> Iterator[tuple[dict[str, np.ndarray] | None, _Position]]:
        """Yield without end each block, or None at the end of the texts, with the position after it."""
        names = ["input_ids", "word_start"] if self._whole_word else ["input_ids"]
        epoch, source, skip, tokens = start.epoch, start.source, start.skip, start.tokens
        left = {name: np.array(start.left.get(name, ()), np.int32) for name in names}
        while True:
            for state, texts in self._read_texts(epoch, source):
                table = encode_texts(texts, tokenizer=self._tokenizer, max_length=None, whole_word=self._whole_word)
                check_ids(datasets.Dataset(datasets.table.InMemoryTable(table)), vocab_size=self._vocab_size)
                joined = {name: np.concatenate([left[name], flat_values(table[name])]) for name in names}
                kept = _as_lists(left)
                count = len(joined["input_ids"]) // self._block
                for place in range(skip, count):
                    span = slice(place * self._block, (place + 1) * self._block)
                    after = _Position(epoch, state, kept, place + 1, tokens)
                    yield {name: values[span] for name, values in joined.items()}, after
                tokens += len(joined["input_ids"]) - len(left["input_ids"])
                left = {name: values[count * self._block :] for name, values in joined.items()}
                skip = 0
            self._check_epoch(tokens, first=epoch == 0)
            logger.info("Epoch %d of the stream is read: %d tokens.", epoch, tokens)
            epoch, source, tokens = epoch + 1, None, 0
            yield None, _Position(epoch, None, _as_lists(left), 0, 0)

    def _read_texts(self, epoch: int, source: dict[str, Any] | None) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yield up to `_TEXTS` texts at a time of one pass, with the state of the stream before them."""
        # `datasets` takes up a loaded state only in the epoch that it names.
        state = {**self._beginning, "epoch": epoch} if source is None else source
        self._source.set_epoch(epoch)
        self._source.load_state_dict(state)
        texts = _texts_of(self._source)
        while found := list(itertools.islice(texts, _TEXTS)):
            kept = [text for text in found if text not in self._excluded]
            if kept:
                yield state, kept
            state = self._source.state_dict()

    def _check_epoch(self, tokens: int, *, first: bool) -> None:
        if tokens == 0:
            raise DataError(
                f"The stream has no texts left to train on after the {len(self._held_out)} of --num_eval_samples: "
                "lower it, or give more text."
            )
        if first and tokens < self._block:
            raise DataError(
                f"The stream has {tokens} tokens to train on, less than one block of {self._block}: "
                f"lower --max_seq_length to at most {tokens}."
            )


def _as_lists(columns: dict[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in columns.items()}


def _texts_of(texts: datasets.IterableDataset) -> Iterator[str]:
    return (row["text"] for row in texts)
