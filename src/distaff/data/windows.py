"""Questions with their contexts as rows of tokens. A context that is too long is read in windows that overlap.

A row is question and context, in this order where the tokenizer pads on the right and the other way round where it pads
on the left, with the tokenizer's special tokens. Rows are padded on the right whatever the side, so that a token has
the same position in a batch as alone.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from distaff.core.errors import DataError, UsageError
from distaff.data.columns import pad_rows
from distaff.data.encode import tokenizer_identity
from distaff.data.text import map_texts

logger = logging.getLogger(__name__)

_FORMAT = 1
# Of a row, what the question leaves to the context at least; it is cut where it would leave less.
_CONTEXT_SHARE = 4
# A position that nobody knows: it is not learnt and not scored.
IGNORED = -100


@dataclass(frozen=True)
class Window:
    """One row of tokens.

    row: the number of its question. encoding: ids, types, offsets and words, as the `tokenizers` library gives them.
    context: `[length]` bool, true at tokens of the context. null: the position that stands for "no answer".
    """

    row: int
    encoding: Any
    context: np.ndarray
    null: int

    @property
    def offsets(self) -> np.ndarray:
        """First character of each token in its text and the one behind its last, `[length, 2]`."""
        return np.array(self.encoding.offsets, np.int32).reshape(-1, 2)


def check_windows(tokenizer: Any, *, max_length: int, stride: int) -> None:
    """Raise `UsageError` for a tokenizer that tells no offsets, and for lengths that no window can have."""
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not tell where its tokens stand in the text, which answers need: take a "
            "fast tokenizer (tokenizer.json)."
        )
    smallest = tokenizer.num_special_tokens_to_add(pair=True) + 2
    if max_length < smallest:
        raise UsageError(f"Rows of {max_length} tokens hold no question and context: give {smallest} or more.")
    if not 0 <= stride < max_length:
        raise UsageError(f"doc_stride is {stride}: windows of {max_length} tokens cannot share so many; give less.")


def cut_windows(
    tokenizer: Any,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    max_length: int,
    stride: int,
    max_question_length: int | None = None,
) -> tuple[list[Window], set[int]]:
    """Return the windows of each question, in order, and which questions were cut.

    A row has `max_length` tokens at most, and a window begins with the last `stride` tokens of the one before it; with
    half of its context where a long question leaves no room for so many. A question is cut where it has more than
    `max_question_length` tokens, and where it would leave less than a quarter of the row to the context.
    """
    backend, first = tokenizer.backend_tokenizer, tokenizer.padding_side == "right"
    most = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    limit = max(1, min(most - max(1, max_length // _CONTEXT_SHARE), max_question_length or most))
    with _without_cuts(backend):
        kept, lengths = _shorten(backend, questions, limit)
        rooms = [most - length for length in lengths]
        overlaps = np.array([stride if stride < room else room // 2 for room in rooms], np.int64)
        pieces: list[list[Any]] = [[] for _ in kept]
        for overlap in np.unique(overlaps):
            backend.enable_truncation(
                max_length, stride=int(overlap), strategy="only_second" if first else "only_first", direction="right"
            )
            chosen = np.flatnonzero(overlaps == overlap).tolist()
            pairs = [(kept[row], contexts[row]) if first else (contexts[row], kept[row]) for row in chosen]
            for row, encoding in zip(chosen, backend.encode_batch(pairs)):
                pieces[row] = [encoding, *encoding.overflowing]
    whole = [tokenizer.cls_token_id, tokenizer.bos_token_id]
    windows = [
        Window(row, piece, np.array([part == int(first) for part in piece.sequence_ids]), _null(piece.ids, whole))
        for row, several in enumerate(pieces)
        for piece in several
    ]
    return windows, {row for row, question in enumerate(questions) if kept[row] != question}


@contextmanager
def _without_cuts(backend: Any) -> Iterator[None]:
    """Leave the tokenizer's own padding and truncation as they were."""
    padding, truncation = backend.padding, backend.truncation
    backend.no_padding()
    backend.no_truncation()
    try:
        yield
    finally:
        if padding is not None:
            backend.enable_padding(**padding)
        backend.no_truncation() if truncation is None else backend.enable_truncation(**truncation)


def _shorten(backend: Any, questions: Sequence[str], limit: int) -> tuple[list[str], list[int]]:
    """Return the questions cut to `limit` tokens, and how many tokens they have."""
    kept, lengths = list(questions), []
    for row, encoding in enumerate(backend.encode_batch(kept, add_special_tokens=False)):
        length = len(encoding)
        for count in range(limit, -1, -1):
            if length <= limit:
                break
            # The first part of a word may have more tokens alone than it had: one less, then.
            kept[row] = questions[row][: encoding.offsets[count - 1][1]] if count else ""
            length = len(backend.encode(kept[row], add_special_tokens=False))
        lengths.append(length)
    return kept, lengths


def _null(ids: list[int], candidates: list[int | None]) -> int:
    """Return the position of the first token that stands for the whole row."""
    return next((ids.index(token) for token in candidates if token is not None and token in ids), 0)


# Rows of a dataset.


def tokenize_questions(
    dataset: datasets.Dataset,
    *,
    tokenizer: Any,
    max_length: int,
    stride: int,
    token_types: bool,
    num_proc: int | None = None,
    overwrite_cache: bool = False,
) -> datasets.Dataset:
    """Return one row a window.

    Columns: `row`, the question's number in `dataset`; `input_ids`, and with `token_types` `token_type_ids`; `first`
    and `last`, the characters of the context that each token begins and ends at, -1 for tokens of something else;
    `null`, the position that stands for "no answer"; `start` and `end`, the first and last token of the first answer,
    or twice `null` where the window does not hold all of it, or twice -100 where nobody knows the answer.
    """
    check_windows(tokenizer, max_length=max_length, stride=stride)
    lists = ("input_ids", *(["token_type_ids"] if token_types else []), "first", "last")
    whole = datasets.Value("int32")
    features = {name: datasets.List(whole) for name in lists}
    features |= dict.fromkeys(("row", "null", "start", "end"), whole) | {"cut": datasets.Value("bool")}
    numbered = dataset.select_columns(["question", "context", "texts", "starts"]).add_column(
        "row", np.arange(len(dataset), dtype=np.int32), new_fingerprint=f"{dataset._fingerprint}-numbered"
    )
    rows = map_texts(
        numbered,
        _encode,
        inputs=["row", "question", "context", "texts", "starts"],
        arguments={"tokenizer": tokenizer, "max_length": max_length, "stride": stride, "token_types": token_types},
        features=features,
        depends=(_FORMAT, tokenizer_identity(tokenizer), tokenizer.padding_side, max_length, stride, token_types),
        num_proc=num_proc,
        overwrite_cache=overwrite_cache,
    )
    _report(dataset, rows, max_length)
    return rows.remove_columns("cut")


def _report(dataset: datasets.Dataset, rows: datasets.Dataset, max_length: int) -> None:
    table = rows.with_format("numpy")
    row, start, null = (np.asarray(table[name]) for name in ("row", "start", "null"))
    held = set(row[start != null].tolist())
    lost = sum(bool(texts) and number not in held for number, texts in enumerate(dataset["texts"]))
    logger.info(
        "%d questions in %d windows of at most %d tokens; %d questions were cut, %d answers are in no window whole.",
        len(dataset),
        len(rows),
        max_length,
        len(set(row[np.asarray(table["cut"])].tolist())),
        lost,
    )


def _encode(
    rows: list[int],
    questions: list[str],
    contexts: list[str],
    texts: list[list[str] | None],
    starts: list[list[int] | None],
    *,
    tokenizer: Any,
    max_length: int,
    stride: int,
    token_types: bool,
) -> pa.Table:
    # Spaces before a question say nothing and are a token for some tokenizers.
    asked = [question.lstrip() for question in questions]
    windows, cut = cut_windows(tokenizer, asked, contexts, max_length=max_length, stride=stride)
    values = []
    for window in windows:
        if not window.context.any():
            text = contexts[window.row][:40]
            raise DataError(f"Question {rows[window.row] + 1} has a context without tokens ({text!r}).")
        offsets = np.where(window.context[:, None], window.offsets, -1)
        start, end = answer_positions(offsets, window.null, texts[window.row], starts[window.row])
        value = {"input_ids": window.encoding.ids, "first": offsets[:, 0], "last": offsets[:, 1], "null": window.null}
        value |= {"row": rows[window.row], "start": start, "end": end, "cut": window.row in cut}
        values.append(value | ({"token_type_ids": window.encoding.type_ids} if token_types else {}))
    return pa.table({name: pa.array([value[name] for value in values]) for name in values[0]})


def answer_positions(
    offsets: np.ndarray, null: int, texts: Sequence[str] | None, starts: Sequence[int] | None
) -> tuple[int, int]:
    """Return the first and the last token of the first answer, see `tokenize_questions`.

    offsets: `[length, 2]`, first character of a token of the context and the one behind its last; -1 elsewhere.
    """
    if texts is None or starts is None:
        return IGNORED, IGNORED
    if not texts:
        return null, null
    begin = starts[0] + len(texts[0]) - len(texts[0].lstrip())
    end = begin + len(texts[0].strip())
    inside = np.flatnonzero(offsets[:, 1] >= 0)
    if not inside.size or offsets[inside[0], 0] > begin or offsets[inside[-1], 1] < end:
        return null, null
    touched = inside[(offsets[inside, 1] > begin) & (offsets[inside, 0] < end)]
    return (int(touched[0]), int(touched[-1])) if touched.size else (null, null)


@dataclass(frozen=True)
class WindowCollate:
    """Makes batches of windows, padded with `pad_id`; padding is told by position, for a text may hold any id."""

    pad_id: int

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` and, where there are some, `token_type_ids`, each `[batch, length]`.

        So is `allowed`, 1 where an answer may stand and at "no answer". `start` and `end` are `[batch]` int32, and
        `weights` `[batch]` float32.
        """
        input_ids, attention_mask = pad_rows(rows["input_ids"], length=length, fill=self.pad_id)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if "token_type_ids" in rows.column_names:
            batch["token_type_ids"] = pad_rows(rows["token_type_ids"], length=length, fill=0)[0]
        allowed = pad_rows(rows["first"], length=length, fill=-1)[0] >= 0
        allowed[np.arange(len(allowed)), rows["null"].to_numpy()] = True
        batch |= {name: rows[name].to_numpy().astype(np.int32) for name in ("start", "end")}
        return batch | {"allowed": allowed.astype(np.int32), "weights": weights}
