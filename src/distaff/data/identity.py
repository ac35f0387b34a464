"""What batches are a function of besides the step, in a form that a checkpoint keeps and a resume compares."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

# Rows that are looked at: another text, or another tokenizer, shows in any of them.
_LOOKED_AT = 64


def content_mark(dataset: Any, *, rows: int) -> str:
    """Return a mark of the content of `dataset`, whose items are tables, from rows spread over all of it."""
    chosen = np.unique(np.linspace(0, rows - 1, _LOOKED_AT).astype(np.int64))
    return mark(dataset[chosen].to_pylist())


def mark(value: Any) -> str:
    """Return twelve characters that are others for another `value` (of plain types)."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def settings_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, those of dataclasses in it too, by name; nothing for other objects."""
    if not dataclasses.is_dataclass(value):
        return {}
    found: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        inner = getattr(value, each.name)
        found |= settings_of(inner) if dataclasses.is_dataclass(inner) else {each.name: inner}
    return found
