"""Long texts in rows that overlap, and the special tokens around them; for recipes and for pipelines."""

from typing import Any

import numpy as np

# A row shares this part of its pieces with the next one of the same text.
_OVERLAP = 4


def special_tokens(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the special tokens that the tokenizer puts before and after a text; both int32."""
    whole = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    before = next(start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return np.array(whole[:before], np.int32), np.array(whole[before + len(bare) :], np.int32)


def windows(length: int, room: int) -> list[tuple[slice, np.ndarray]]:
    """Return the parts that a sentence of `length` pieces has in rows with `room` for so many.

    With each part comes which of its pieces it owns, `[pieces]` bool: every piece is owned once.
    """
    overlap = room // _OVERLAP
    stride = room - overlap
    count = 1 + max(0, -(-(length - room) // stride))
    found = []
    for number in range(count):
        part = slice(number * stride, min(length, number * stride + room))
        places = np.arange(part.start, part.stop)
        owned = np.ones(len(places), bool)
        if number > 0:
            owned &= places >= part.start + overlap // 2
        if number < count - 1:
            owned &= places < part.start + stride + overlap // 2
        found.append((part, owned))
    return found


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of `logits`, over the last axis, in double precision."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True, initial=-np.inf)
    exponents = np.exp(shifted)
    return exponents / exponents.sum(-1, keepdims=True)
