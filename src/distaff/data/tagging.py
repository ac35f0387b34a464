"""Words with tags as rows of pieces with labels, and the tags of words out of what a model says of pieces.

A sentence that is longer than a row becomes several, which overlap. Each piece is owned by the one row in which it
stands farthest from an edge, and counts there alone: in the loss, and for the tag of its word.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from distaff.core.errors import DataError, UsageError
from distaff.data.columns import flat_values, pad_rows
from distaff.data.encode import tokenizer_identity
from distaff.data.pieces import softmax, special_tokens, windows
from distaff.data.text import map_texts

logger = logging.getLogger(__name__)

# Goes into the names of cached files: raise it when what they hold changes.
_FORMAT = 1
_NO_LABEL = -100
OUTSIDE = "O"


def tokenize_sentences(
    dataset: datasets.Dataset,
    *,
    tokenizer: Any,
    labels: Sequence[str],
    max_length: int,
    label_all_tokens: bool = False,
    num_proc: int | None = None,
    overwrite_cache: bool = False,
) -> datasets.Dataset:
    """Return rows of at most `max_length` pieces with special tokens around them; a sentence has one or more.

    Columns, the first three lists of equal length: `input_ids`; `labels`, -100 where nothing is scored; `words`, at the
    first piece of each word its number in the sentence, else -1; and `first`, true at the first row of a sentence.
    `labels` are at the first piece of each word, or with `label_all_tokens` at all, which inside a word that begins an
    entity (B-) are of its inside (I-), if there is such a label.

    Raises `UsageError` for a tokenizer that does not tell which word a piece is of.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not tell which word a piece belongs to: take a tokenizer with a "
            "tokenizer.json."
        )
    smallest = tokenizer.num_special_tokens_to_add(pair=False) + 1
    if max_length < smallest:
        raise UsageError(f"--max_seq_length is {max_length}: this tokenizer needs {smallest} or more.")
    numbers = datasets.List(datasets.Value("int32"))
    rows = map_texts(
        dataset,
        encode_sentences,
        inputs=["words", "tags"],
        arguments={
            "tokenizer": tokenizer,
            "labels": list(labels),
            "max_length": max_length,
            "label_all_tokens": label_all_tokens,
        },
        features={"input_ids": numbers, "labels": numbers, "words": numbers, "first": datasets.Value("bool")},
        depends=(_FORMAT, tokenizer_identity(tokenizer), list(labels), max_length, label_all_tokens),
        num_proc=num_proc,
        overwrite_cache=overwrite_cache,
    )
    logger.info(
        "%d sentences tokenised; %d more rows for what is longer than %d tokens.",
        len(dataset),
        len(rows) - len(dataset),
        max_length,
    )
    words = sum(len(sentence) for sentence in dataset["words"])
    if vanished := words - int(np.sum(flat_values(rows.data.column("words")) >= 0)):
        logger.warning("%d of %d words have no piece in this tokenizer: they are tagged O.", vanished, words)
    return rows


def encode_sentences(
    words: list[list[str]],
    tags: list[list[str] | None],
    *,
    tokenizer: Any,
    labels: list[str],
    max_length: int,
    label_all_tokens: bool,
) -> pa.Table:
    """Return the rows of sentences; see `tokenize_sentences`."""
    before, after = special_tokens(tokenizer)
    ids = {label: number for number, label in enumerate(labels)}
    inside = {ids[label]: ids.get(f"I-{label[2:]}", ids[label]) for label in labels if label.startswith("B-")}
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "words": [], "first": []}
    for row_tags, (pieces, numbers) in zip(tags, pieces_of(words, tokenizer)):
        starts = np.r_[True, numbers[1:] != numbers[:-1]][: len(numbers)]
        wanted = np.full(len(pieces), _NO_LABEL, np.int32)
        if row_tags is not None and len(pieces):
            wanted = np.array([ids[tag] for tag in row_tags], np.int32)[numbers]
            if not label_all_tokens:
                wanted[~starts] = _NO_LABEL
            else:
                wanted[~starts] = [inside.get(label, label) for label in wanted[~starts].tolist()]
        for window, owned in windows(len(pieces), max_length - len(before) - len(after)):
            around = [(len(before), len(after))]
            columns["input_ids"].append(np.concatenate([before, pieces[window], after]))
            kept = np.where(owned, wanted[window], _NO_LABEL)
            columns["labels"].append(np.pad(kept, around, constant_values=_NO_LABEL))
            at = np.where(owned & starts[window], numbers[window], -1)
            columns["words"].append(np.pad(at, around, constant_values=-1))
            columns["first"].append(window.start == 0)
    numbers_of = pa.list_(pa.int32())
    return pa.table({name: pa.array(rows, None if name == "first" else numbers_of) for name, rows in columns.items()})


def pieces_of(sentences: list[list[str]], tokenizer: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each sentence its pieces without special tokens, and of which word each is; both [pieces] int32.

    A word that the tokenizer drops (a newline, an empty one) has no piece and takes no number from the others.
    """
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    encodings = backend.encode_batch(sentences, is_pretokenized=True, add_special_tokens=False)
    return [(np.array(each.ids, np.int32), np.array(each.word_ids, np.int32)) for each in encodings]


@dataclass(frozen=True)
class TagCollate:
    """Makes batches of rows of pieces."""

    pad_id: int

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` and `labels`, [batch, length] int32, and `label_weights` float32.

        Labels are 0 where they weigh nothing.
        """
        input_ids, attention_mask = pad_rows(rows["input_ids"], length=length, fill=self.pad_id)
        labels, _ = pad_rows(rows["labels"], length=length, fill=_NO_LABEL)
        scored = labels != _NO_LABEL
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": np.where(scored, labels, 0),
            "label_weights": scored.astype(np.float32) * weights[:, None],
        }


@dataclass(frozen=True)
class WordTags:
    """The tag of each word of a sentence, and its probability."""

    tags: list[str]
    scores: list[float]


def tags_of_words(
    dataset: datasets.Dataset, rows: datasets.Dataset, logits: Sequence[np.ndarray], labels: Sequence[str]
) -> list[WordTags]:
    """Return a tag for every word of every sentence of `dataset`.

    Args:
        rows: what `tokenize_sentences` made of `dataset`.
        logits: for each of the rows [pieces or more, labels].

    A word without pieces is outside (O) with a score of 0.
    """
    counts = [len(words) for words in dataset["words"]]
    tags = [[OUTSIDE] * count for count in counts]
    scores = [[0.0] * count for count in counts]
    sentence = -1
    for words, first, values in zip(rows["words"], rows["first"], logits, strict=True):
        sentence += first
        numbers = np.asarray(words)
        places = np.flatnonzero(numbers >= 0)
        probabilities = softmax(np.asarray(values)[places])
        best = probabilities.argmax(-1)
        for place, label, row in zip(numbers[places].tolist(), best.tolist(), probabilities):
            tags[sentence][place] = labels[label]
            scores[sentence][place] = float(row[label])
    if sentence + 1 != len(counts):
        raise DataError(f"{len(counts)} sentences and rows of {sentence + 1}: the rows are of other sentences.")
    return [WordTags(*each) for each in zip(tags, scores)]
