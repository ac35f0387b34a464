"""BART's pretraining: sentences change places, and spans of any length, none too, become one mask token each.

    row      <s> a b . c d e . f g </s>
    input    <s> c <mask> . a <mask> b . <mask> </s>
    target   the row itself

(Lewis et al. 2019, https://arxiv.org/abs/1910.13461, section 2.2: text infilling and sentence permutation.)
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from distaff.core.errors import UsageError
from distaff.data.columns import pad_rows
from distaff.data.draws import row_keys, uniforms


def sentence_ends(tokenizer: Any) -> np.ndarray:
    """Return which tokens end a sentence, [vocab] booleans: those that end in a full stop, "?" or "!", and eos."""
    ends = np.zeros(len(tokenizer), bool)
    for token, index in tokenizer.get_vocab().items():
        ends[index] = token.endswith((".", "?", "!", "。"))
    if tokenizer.eos_token_id is not None:
        ends[tokenizer.eos_token_id] = True
    return ends


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Makes batches of BART's pretraining out of rows of at most `length - 2` tokens; fixed by (seed, epoch, index).

    mask_ratio: share of a row's tokens that are masked, in spans whose lengths are Poisson(`poisson_lambda`).
    permute_ratio: share of a row's sentences that change places with each other. sentence_ends: [vocab] booleans.
    """

    length: int
    mask_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    start_id: int
    sentence_ends: np.ndarray
    mask_ratio: float = 0.3
    poisson_lambda: float = 3.0
    permute_ratio: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.mask_ratio <= 1:
            raise UsageError(f"--mlm_probability is {self.mask_ratio}: it must be above 0 and at most 1.")
        if self.poisson_lambda <= 0:
            raise UsageError(f"--poisson_lambda is {self.poisson_lambda}: it must be above 0.")
        if not 0 <= self.permute_ratio <= 1:
            raise UsageError(f"--permute_sentence_ratio is {self.permute_ratio}: it must be from 0 to 1.")
        if self.length < 3:
            raise UsageError(f"{self.length} tokens are too few for a row of text between two special tokens.")

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return arrays [batch, length] of both sides.

        `input_ids`, `attention_mask`, `labels` and `decoder_input_ids` are int32, `label_weights` float32.
        """
        tokens, present = pad_rows(rows["input_ids"], length=self.length - 2, fill=self.pad_id)
        counts = present.sum(axis=1)
        keys = row_keys(self.seed, epoch, indices)
        labels, scored = self._around(tokens, counts)
        input_ids, attention_mask = self._around(*self.infill(self.permute(tokens, counts, keys), counts, keys))
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "label_weights": scored.astype(np.float32) * weights[:, None],
            "decoder_input_ids": np.concatenate([np.full_like(labels[:, :1], self.start_id), labels[:, :-1]], axis=1),
        }

    def permute(self, tokens: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return `tokens` [batch, width], of which rows have `counts`, with sentences that changed places."""
        width = tokens.shape[1]
        places = np.arange(width)[None, :]
        ends = self.sentence_ends[tokens] & (places < counts[:, None])
        sentence = np.cumsum(ends, axis=1) - ends  # [batch, width]: the number of each token's sentence
        exists = places <= np.take_along_axis(sentence, np.maximum(counts - 1, 0)[:, None], axis=1)
        moves = exists & (uniforms(keys, width, draw=0) < self.permute_ratio)
        # The places of those that move, in order, go to them in random order; the others keep their own.
        order = np.argsort(np.where(moves, uniforms(keys, width, draw=1), 2.0), axis=1)
        slots = np.argsort(np.where(moves, places, width), axis=1, kind="stable")
        goes_to = np.broadcast_to(places, tokens.shape).copy()
        moving = places < moves.sum(axis=1, keepdims=True)
        rows, ranks = np.nonzero(moving)
        goes_to[rows, order[rows, ranks]] = slots[rows, ranks]
        target = np.where(places < counts[:, None], np.take_along_axis(goes_to, sentence, axis=1), width)
        return np.take_along_axis(tokens, np.argsort(target, axis=1, kind="stable"), axis=1)

    def infill(self, tokens: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows [batch, width] in which each span is one mask token, and how many tokens they have now.

        A row is a random sequence of tokens that stay and of spans, so that two masks may stand side by side.
        """
        spans, lengths = self.span_lengths(counts, keys)
        places = np.arange(tokens.shape[1])[None, :]
        items = counts - lengths.sum(axis=1) + spans  # [batch]
        present = places < items[:, None]
        draws = np.where(present, uniforms(keys, tokens.shape[1], draw=3), 2.0)
        is_span = present & (np.argsort(np.argsort(draws, axis=1), axis=1) < spans[:, None])
        number = np.cumsum(is_span, axis=1)  # spans up to each item
        hidden = np.concatenate([np.zeros_like(lengths[:, :1]), np.cumsum(lengths, axis=1)], axis=1)
        taken = np.take_along_axis(hidden, np.minimum(number, lengths.shape[1]), axis=1)
        source = np.minimum(places - number + taken, tokens.shape[1] - 1)
        kept = np.take_along_axis(tokens, source, axis=1)
        return np.where(present, np.where(is_span, self.mask_id, kept), self.pad_id), items

    def span_lengths(self, counts: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many spans rows of `counts` tokens have, [batch], and their lengths, [batch, most spans].

        The last span is cut so that the share of masked tokens is as asked; there are never more masks than tokens
        that they hide, so that no row grows.
        """
        budget = np.minimum(np.ceil(np.round(counts * self.mask_ratio, 6)).astype(np.int64), counts)
        width = max(1, int(budget.max(initial=0)))
        drawn = np.searchsorted(self._poisson(), uniforms(keys, width, draw=2), side="right")
        before = np.cumsum(drawn, axis=1) - drawn
        used = (before < budget[:, None]) & (np.arange(width)[None, :] < budget[:, None])
        lengths = np.where(used, np.minimum(drawn, budget[:, None] - before), 0)
        spans = used.sum(axis=1)
        lengths[:, 0] += np.maximum(spans - lengths.sum(axis=1), 0)
        return spans, lengths

    def _poisson(self) -> np.ndarray:
        """Return the cumulative probabilities of lengths 0, 1, ..., so far that the rest is below 1e-9."""
        probability, total, table = math.exp(-self.poisson_lambda), 0.0, []
        for length in range(1, 10 + int(10 * self.poisson_lambda + 30)):
            total += probability
            table.append(total)
            probability *= self.poisson_lambda / length
        return np.array(table)

    def _around(self, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Put bos and eos around the first `counts` tokens of each row; return ids and mask [batch, length] int32."""
        text = np.full((len(tokens), self.length), self.pad_id, np.int32)
        text[:, 0] = self.bos_id
        present = np.arange(tokens.shape[1])[None, :] < counts[:, None]
        text[:, 1:-1] = np.where(present, tokens, self.pad_id)
        text[np.arange(len(tokens)), counts + 1] = self.eos_id
        return text, (np.arange(self.length)[None, :] < counts[:, None] + 2).astype(np.int32)
