"""Stop strings as a table: which bytes each token adds, and how far each string is spelled after it.

The table is an automaton (Aho and Corasick 1975) over the tokens' bytes, so that a compiled loop follows the text of
samples and of beams without leaving the device. A state is the longest end of the text that begins a string.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from distaff.core.errors import UsageError
from distaff.generation.processors import Values

# Tokenizers spell some tokens otherwise at the start of a text: each token is spelled behind this word.
ANCHOR = "abcdef"
# The fewest states of a table; powers of two above, so that other strings seldom need another program.
SMALLEST = 16

# By tokenizer: how many tokens it had, and their bytes.
_spelled: WeakKeyDictionary[Any, tuple[int, list[bytes]]] = WeakKeyDictionary()


def stop_values(strings: Sequence[str], tokenizer: Any, prompts: Sequence[np.ndarray], *, vocab: int) -> Values:
    """Return "stop_table" `[states, vocab]` and "stop_start" `[batch]`, the states after the prompts' tokens.

    An entry is the state after a token, as `-1 - state` where the token completes a string. Raises `UsageError` for
    strings that cannot come.
    """
    if not all(strings):
        raise UsageError("stop_strings holds an empty string: leave it out.")
    if not hasattr(tokenizer, "get_vocab"):
        raise UsageError(f"stop_strings={list(strings)!r} are looked for in text: pass tokenizer=...")
    steps, complete = _automaton([string.encode() for string in strings])
    table = _table(steps, complete, spelled(tokenizer)[:vocab], vocab)
    starts = np.zeros(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        for token in prompt:
            entry = table[starts[row], token]
            starts[row] = max(entry, -1 - entry)
    if not _can_come(table, starts):
        raise UsageError(f"The tokenizer's tokens spell none of stop_strings={list(strings)!r}: correct them.")
    return {"stop_table": table, "stop_start": starts}


def _can_come(table: np.ndarray, starts: np.ndarray) -> bool:
    """Return whether tokens lead from one of the states `starts` to a complete string."""
    reached, count = np.unique(np.append(starts, 0)), 0
    while len(reached) > count:
        entries, count = table[reached], len(reached)
        reached = np.union1d(reached, np.maximum(entries, -1 - entries))
    return bool((table[reached] < 0).any())


def follow(states: jax.Array, tokens: jax.Array, values: Values) -> tuple[jax.Array, jax.Array]:
    """Return the states after `tokens`, and where a token completed a string; all of one shape."""
    entries = values["stop_table"][states, tokens]
    return jnp.maximum(entries, -1 - entries), entries < 0


def spelled(tokenizer: Any) -> list[bytes]:
    """Return the bytes of text that each token of the tokenizer adds."""
    known = _spelled.get(tokenizer)
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    by_token = tokenizer.get_vocab()
    decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    anchor = tokenizer.convert_ids_to_tokens(tokenizer(ANCHOR, add_special_tokens=False)["input_ids"])
    before = tokenizer.convert_tokens_to_string(anchor)
    spellings = [b""] * (max(by_token.values()) + 1)
    for token, number in by_token.items():
        raw = _raw(token, decoder)
        if raw is None:
            raw = tokenizer.convert_tokens_to_string([*anchor, token]).removeprefix(before).encode()
        spellings[number] = raw
    _spelled[tokenizer] = (len(tokenizer), spellings)
    return spellings


def _raw(token: str, decoder: str) -> bytes | None:
    """Return the bytes of a token that stands for bytes, perhaps for a part of a character; None for one of text."""
    if "ByteFallback" in decoder:
        return bytes.fromhex(token[3:5]) if len(token) == 6 and token.startswith("<0x") else None
    if "ByteLevel" in decoder and all(letter in BYTE_OF for letter in token):
        return bytes(BYTE_OF[letter] for letter in token)
    return None


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies: itself where it shows, or one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF = _byte_letters()


def _automaton(strings: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the state after each byte `[states, 256]`, and the states in which a string is complete `[states]`."""
    beginnings = sorted({string[:length] for string in strings for length in range(len(string) + 1)}, key=len)
    place = {beginning: state for state, beginning in enumerate(beginnings)}
    steps = np.zeros((len(beginnings), 256), np.int32)
    for state, beginning in enumerate(beginnings):
        if beginning:  # what is no longer beginning goes where its longest proper end that is one goes
            ends = (beginning[cut:] for cut in range(1, len(beginning) + 1))
            steps[state] = steps[next(place[end] for end in ends if end in place)]
        for byte in range(256):
            steps[state, byte] = place.get(beginning + bytes([byte]), steps[state, byte])
    return steps, np.asarray([beginning.endswith(tuple(strings)) for beginning in beginnings])


def _table(steps: np.ndarray, complete: np.ndarray, tokens: list[bytes], vocab: int) -> np.ndarray:
    """Return the entries of `stop_values`; one that the tokenizer lacks spells nothing."""
    count = len(complete)
    states = np.broadcast_to(np.arange(count)[:, None], (count, len(tokens))).copy()  # [states, tokens]
    hits = np.zeros(states.shape, bool)
    lengths = np.asarray([len(token) for token in tokens])
    letters = np.zeros((len(tokens), lengths.max(initial=0)), np.uint8)
    for number, token in enumerate(tokens):
        letters[number, : len(token)] = list(token)
    for column in range(letters.shape[1]):
        longer = np.flatnonzero(lengths > column)
        states[:, longer] = steps[states[:, longer], letters[longer, column][None]]
        hits[:, longer] |= complete[states[:, longer]]
    rows = max(SMALLEST, 1 << (count - 1).bit_length())
    table = np.repeat(np.arange(rows, dtype=np.int32)[:, None], vocab, axis=1)
    table[:count, : len(tokens)] = np.where(hits, -1 - states, states)
    return table
