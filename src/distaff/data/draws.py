"""Random numbers that are a function of what they are for, drawn for all rows of a batch at once.

Each row has a key, made from (seed, epoch, index of the example); its numbers are the SplitMix64 sequence that starts
there (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with the constants of Stafford's
variant 13). So they depend neither on the batch a row is in nor on the process, and stay the same under every NumPy.
"""

import numpy as np
from numpy.typing import ArrayLike

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def row_keys(*parts: ArrayLike) -> np.ndarray:
    """Return keys [batch] uint64, a function of all `parts` in their order; each is an integer or integers [batch]."""
    keys = np.zeros(1, np.uint64)
    for part in parts:
        words = np.atleast_1d(np.asarray(part)).astype(np.uint64)
        keys = _mix(keys + _GOLDEN + _mix(words + _GOLDEN))
    return keys


def uniforms(keys: np.ndarray, length: int, *, draw: int) -> np.ndarray:
    """Return numbers [batch, length] in [0, 1), of 53 bits; draws of other numbers `draw` are independent."""
    start = row_keys(keys, draw)[:, None]
    steps = np.arange(1, length + 1, dtype=np.uint64)[None, :]
    return (_mix(start + steps * _GOLDEN) >> np.uint64(11)) * 2.0**-53
