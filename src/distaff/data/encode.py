"""Texts to token ids, at the speed of the tokenizer and without a Python loop over tokens."""

import json
from typing import Any

import datasets
import numpy as np
import pyarrow as pa


def encode_texts(texts: list[str], *, tokenizer: Any, max_length: int | None, whole_word: bool) -> pa.Table:
    """Return the tokens of `texts` with their special tokens, as a table of lists.

    Columns: `input_ids`; with `whole_word` also `word_start`, 1 at the first token of each word and at special tokens;
    with `max_length` also `cut`, true where a text was longer.
    """
    ids, starts = _encode(texts, tokenizer, whole_word)
    columns = {}
    if max_length is not None:
        cut = np.array([len(row) > max_length for row in ids], bool)
        before, after = _around(tokenizer) if cut.any() else (0, 0)
        for index in np.flatnonzero(cut):
            kept = _kept(len(ids[index]), max_length, before, after, tokenizer.truncation_side)
            ids[index] = ids[index][kept]
            if whole_word:
                starts[index] = starts[index][kept]
        columns["cut"] = pa.array(cut)
    columns["input_ids"] = _lists(ids)
    if whole_word:
        columns["word_start"] = _lists(starts)
    return pa.table({name: columns[name] for name in ("input_ids", "word_start", "cut") if name in columns})


def _encode(texts: list[str], tokenizer: Any, whole_word: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the ids of each text, not cut, and where words start."""
    if not tokenizer.is_fast:
        rows = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        return [np.array(row, np.int32) for row in rows], []
    # The same ids as the tokenizer's own call, which computes offsets and copies besides: half the speed, more memory.
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    # The fast variant knows no words.
    encodings = backend.encode_batch(texts) if whole_word else backend.encode_batch_fast(texts)
    ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
    return ids, [_word_starts(encoding.word_ids) for encoding in encodings] if whole_word else []


def _word_starts(word_ids: list[int | None]) -> np.ndarray:
    words = np.array(word_ids, float)  # None, of special tokens, becomes nan, which is unlike its neighbours
    return np.concatenate([[True], words[1:] != words[:-1]])[: len(words)].astype(np.int8)


def _around(tokenizer: Any) -> tuple[int, int]:
    """Return how many special tokens the tokenizer puts before and after a text."""
    whole = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    before = next(start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return before, len(whole) - before - len(bare)


def _kept(length: int, max_length: int, before: int, after: int, side: str) -> np.ndarray:
    """Return which of `length` tokens stay, as the tokenizer's own truncation does: the special ones all do.

    That truncation itself also keeps everything it cut off, which for a text of a megabyte is 200 MB.
    """
    room = max_length - before - after
    start = before if side == "right" else length - after - room
    return np.r_[0:before, start : start + room, length - after : length]


def _lists(rows: list[np.ndarray]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def tokenizer_identity(tokenizer: Any) -> str:
    """Return what a tokenizer's output depends on, and not what it was last called with (lengths, padding)."""
    if not tokenizer.is_fast:
        return datasets.fingerprint.Hasher.hash(tokenizer)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content.update(truncation=None, padding=None)
    return json.dumps([content, tokenizer.truncation_side])
