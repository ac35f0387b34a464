"""Edits of the scores of the next token, in the order of Transformers: penalties, bans, lengths, forced tokens.

Each takes scores `[rows, vocab]` and returns such; values that may differ from call to call are traced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The arrays of a call that edits, filters and stopping read, by name.
Values = dict[str, Any]


class Seen(NamedTuple):
    """What stands before the next token.

    tokens: `[rows, slots]`, prompt and what was generated, prompts padded on the left. filled: how many of the slots
    hold tokens, a scalar. first: `[rows]`, the slot of each row's first token. step: how many were generated, a scalar.
    """

    tokens: jax.Array
    filled: jax.Array
    first: jax.Array
    step: jax.Array

    def present(self) -> jax.Array:
        """Return `[rows, slots]` booleans: a token of the row stands there."""
        slots = jnp.arange(self.tokens.shape[1])[None]
        return (slots >= self.first[:, None]) & (slots < self.filled)

    def last(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Return the last `count` tokens `[rows, count]`, and where the row has so many."""
        places = self.filled - count + jnp.arange(count)
        rows = jnp.take(self.tokens, jnp.maximum(places, 0), axis=1)
        return rows, places[None] >= self.first[:, None]


def marked(ids: jax.Array, chosen: jax.Array, vocab: int) -> jax.Array:
    """Return `[rows, vocab]` booleans: those of `ids` `[rows, count]` that are `chosen`."""
    rows = jnp.arange(ids.shape[0])[:, None]
    # An id outside the vocabulary is dropped.
    return jnp.zeros((ids.shape[0], vocab), bool).at[rows, jnp.where(chosen, ids, vocab)].set(True, mode="drop")


def among(ids: jax.Array, vocab: int) -> jax.Array:
    """Return `[1, vocab]` booleans: the entry is one of `ids` `[count]`."""
    return (jnp.arange(vocab)[:, None] == ids[None]).any(axis=1)[None]


def ban(scores: jax.Array, banned: jax.Array) -> jax.Array:
    """Return the scores with -inf where `banned`."""
    return jnp.where(banned, -jnp.inf, scores)


def _repetition(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    used = marked(seen.tokens, seen.present(), scores.shape[-1])
    penalty = values["repetition_penalty"]
    return jnp.where(used, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def _ngrams(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    size = values["ngram"].shape[0]  # static
    tokens, slots = seen.tokens, seen.tokens.shape[1]
    prefix, whole = seen.last(size - 1)
    starts = slots - size + 1
    equal = jnp.ones((tokens.shape[0], starts), bool)
    for offset in range(size - 1):
        equal &= tokens[:, offset : offset + starts] == prefix[:, offset, None]
    present = seen.present()
    equal &= present[:, :starts] & present[:, size - 1 :] & whole.all(axis=1, keepdims=True)
    return ban(scores, marked(tokens[:, size - 1 :], equal, scores.shape[-1]))


def _bad_words(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    words = values["bad_words"]  # [words, length], filled on the left with -1
    before, own = seen.last(words.shape[1] - 1)
    prefixes = words[:, :-1][None]  # [1, words, length - 1]
    matches = (prefixes < 0) | ((before[:, None] == prefixes) & own[:, None])
    ends = jnp.broadcast_to(words[None, :, -1], (scores.shape[0], words.shape[0]))
    return ban(scores, marked(ends, matches.all(axis=-1), scores.shape[-1]))


def _minimum(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    return ban(scores, among(values["eos"], scores.shape[-1]) & (seen.step < values["minimum"]))


def _forced(scores: jax.Array, ids: jax.Array, now: jax.Array) -> jax.Array:
    only = jnp.where(among(ids, scores.shape[-1]), 0.0, -jnp.inf)
    return jnp.where(now, only, scores)


def _forced_bos(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    return _forced(scores, values["forced_bos"], seen.step == values["forced_step"])


def _forced_eos(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    return _forced(scores, values["forced_eos"], seen.step == values["limit"] - 1)


def _finite(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    return jnp.nan_to_num(scores, nan=0.0)


def _decay(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    """Raise the ending tokens more and more from a step on."""
    late = seen.step - values["decay_start"]
    raised = jnp.abs(scores) * (values["decay_factor"] ** jnp.maximum(late, 0) - 1)
    chosen = among(values["eos"], scores.shape[-1]) & jnp.isfinite(scores) & (late > 0)
    return scores + jnp.where(chosen, raised, 0.0)


def _suppress(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    return ban(scores, among(values["suppress"], scores.shape[-1]))


def _suppress_first(scores: jax.Array, seen: Seen, values: Values) -> jax.Array:
    return ban(scores, among(values["suppress_first"], scores.shape[-1]) & (seen.step == values["first_step"]))


# By name and in order.
EDITS: dict[str, Callable[[jax.Array, Seen, Values], jax.Array]] = {
    "repetition": _repetition,
    "ngrams": _ngrams,
    "bad_words": _bad_words,
    "minimum": _minimum,
    "forced_bos": _forced_bos,
    "forced_eos": _forced_eos,
    "finite": _finite,
    "decay": _decay,
    "suppress": _suppress,
    "suppress_first": _suppress_first,
}


def edit(
    scores: jax.Array, seen: Seen, values: Values, *, names: tuple[str, ...], own: tuple[Callable[..., Any], ...]
) -> jax.Array:
    """Return scores `[rows, vocab]` after the edits `names` and the caller's `own` processors.

    One of those is called with tokens `[rows, slots]`, scores `[rows, vocab]` and the number of filled slots.
    """
    for name, apply in EDITS.items():
        if name in names:
            scores = apply(scores, seen, values)
    for processor in own:
        scores = processor(seen.tokens, scores, seen.filled)
    return scores
