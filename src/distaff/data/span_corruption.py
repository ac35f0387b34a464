"""T5's pretraining: spans of a row are cut out, and written down in order behind the sentinels that stand for them.

    row      a b c d e f g h
    input    a b <0> e f <1> </s>
    target   <0> c d <1> g h </s>

(Raffel et al. 2019, https://arxiv.org/abs/1910.10683, section 3.1.4; lengths and segments as their code draws them.)
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from distaff.core.errors import UsageError
from distaff.data.columns import pad_rows
from distaff.data.draws import row_keys, uniforms


@dataclass(frozen=True)
class SpanLengths:
    """Lengths in tokens: a `raw` row loses `noise` in `spans`; `inputs` and `targets` are those of encoder and decoder.

    density, mean_span: what they were computed from.
    """

    raw: int
    inputs: int
    targets: int
    noise: int
    spans: int
    density: float
    mean_span: float

    def explained(self) -> str:
        """Return a sentence on where the numbers come from."""
        left = self.raw - self.noise
        return (
            f"A row is {self.raw} tokens of text, of which {self.noise} ({self.density:.0%}) are cut out in "
            f"{self.spans} span(s): the encoder reads the other {left}, {self.spans} sentinel(s) and an eos token, "
            f"{left + self.spans + 1} of at most {self.inputs}; the decoder writes {self.noise} tokens, "
            f"{self.spans} sentinel(s) and an eos token, {self.noise + self.spans + 1} of {self.targets}."
        )


def noise_counts(raw: Any, density: float, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens of rows of `raw` tokens are noise, and in how many spans; of the shape of `raw`."""
    raw = np.asarray(raw, np.int64)
    noise = np.where(raw < 2, 0, np.clip(np.round(raw * density), 1, np.maximum(raw - 1, 1)))
    spans = np.clip(np.round(noise / mean_span), np.minimum(noise, 1), np.minimum(noise, raw - noise))
    return noise.astype(np.int64), spans.astype(np.int64)


def span_lengths(inputs: int, *, density: float = 0.15, mean_span: float = 3.0) -> SpanLengths:
    """Return the lengths with which as much text as possible fits an encoder of `inputs` tokens."""
    if not 0 < density < 1:
        raise UsageError(f"The noise density is {density}: it must be between 0 and 1.")
    if mean_span < 1:
        raise UsageError(f"The mean length of a noise span is {mean_span}: it must be at least 1.")
    if inputs < 4:
        raise UsageError(f"{inputs} tokens are too few for a row of text, a sentinel and an eos token: 4 are needed.")

    def counts(raw: int) -> tuple[int, int]:
        noise, spans = noise_counts(raw, density, mean_span)
        return int(noise), int(spans)

    def encoded(raw: int) -> int:
        noise, spans = counts(raw)
        return raw - noise + spans + 1

    raw = inputs
    while encoded(raw + 1) <= inputs:
        raw += 1
    while raw - counts(raw)[0] + 2 > inputs:
        raw -= 1
    noise, spans = counts(raw)
    targets = noise + spans + 1
    if density == 0.5 and targets > inputs:
        # As in T5's code: half of a text is as long as the other half, and `inputs` is likely to be a round number.
        raw, targets = raw - 1, targets - 1
        noise, spans = counts(raw)
    # With spans of about one token, even `inputs` tokens may come out one too long: then there is one span less.
    spans = min(spans, inputs - 1 - (raw - noise))
    return SpanLengths(raw, inputs, targets, noise, spans, density, mean_span)


def sentinel_ids(tokenizer: Any) -> np.ndarray:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>`, ... as far as they go; raises `UsageError` without any."""
    vocabulary = tokenizer.get_vocab()
    numbers = sorted(int(match[1]) for token in vocabulary if (match := re.fullmatch(r"<extra_id_(\d+)>", token)))
    if not numbers:
        raise UsageError(
            f"The tokenizer '{tokenizer.name_or_path}' has no sentinels, which stand for spans: choose T5's, or train "
            "one with 'distaff tokenizer train --extra_ids 100'."
        )
    return np.array([vocabulary[f"<extra_id_{number}>"] for number in numbers], np.int32)


def check_sentinels(count: int, lengths: SpanLengths) -> None:
    """Raise `UsageError` where rows have more spans than there are sentinels."""
    if lengths.spans > count:
        raise UsageError(
            f"Rows of {lengths.inputs} tokens have {lengths.spans} spans and the tokenizer {count} sentinel(s): "
            "shorten the rows, raise --mean_noise_span_length, or train a tokenizer with more."
        )


@dataclass(frozen=True)
class SpanCorruption:
    """Makes batches of T5's pretraining out of rows of at most `lengths.raw` tokens; fixed by (seed, epoch, index)."""

    lengths: SpanLengths
    sentinels: np.ndarray
    eos_id: int
    pad_id: int
    start_id: int
    seed: int = 0

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return arrays of both sides.

        `input_ids` and `attention_mask` are [batch, inputs]; `labels`, `decoder_input_ids` and the float32
        `label_weights` are [batch, targets].
        """
        tokens, present = pad_rows(rows["input_ids"], length=self.lengths.raw, fill=0)
        noise = self.noise_mask(present.sum(axis=1), row_keys(self.seed, epoch, indices))
        input_ids, attention_mask = self.written(tokens, hidden=noise, present=present == 1, width=self.lengths.inputs)
        hidden = ~noise & (present == 1)
        # A row of one token loses nothing: then the target is the eos token alone.
        wanted = (present == 1) & noise.any(axis=1, keepdims=True)
        labels, scored = self.written(tokens, hidden=hidden & wanted, present=wanted, width=self.lengths.targets)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "label_weights": scored.astype(np.float32) * weights[:, None],
            "decoder_input_ids": np.concatenate([np.full_like(labels[:, :1], self.start_id), labels[:, :-1]], axis=1),
        }

    def noise_mask(self, raw: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return booleans [batch, raw] for rows of `raw` [batch] tokens: kept and cut segments in turn, kept first."""
        noise, spans = noise_counts(raw, self.lengths.density, self.lengths.mean_span)
        spans = np.minimum(spans, self.lengths.inputs - 1 - (raw - noise))
        kept_lengths = _segments(raw - noise, spans, uniforms(keys, self.lengths.raw, draw=0))
        cut_lengths = _segments(noise, spans, uniforms(keys, self.lengths.raw, draw=1))
        lengths = np.stack([kept_lengths, cut_lengths], axis=2).reshape(len(raw), -1)  # [batch, 2 * segments]
        ends = np.cumsum(lengths, axis=1)
        # How many segments end before each place tells which kind it is in; empty ones come in pairs.
        marks = np.zeros((len(raw), self.lengths.raw + 1), np.int64)
        np.add.at(marks, (np.arange(len(raw))[:, None], np.minimum(ends, self.lengths.raw)), 1)
        return np.cumsum(marks, axis=1)[:, :-1] % 2 == 1

    def written(
        self, tokens: np.ndarray, *, hidden: np.ndarray, present: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `tokens` with a sentinel for each run of `hidden` ones and an eos token behind, and where text is.

        Both are [batch, width] int32, padded on the right; padding is told by `present`, never by an id.
        """
        starts = hidden & ~np.pad(hidden[:, :-1], ((0, 0), (1, 0)))
        number = np.minimum(np.cumsum(starts, axis=1) - 1, len(self.sentinels) - 1)
        values = np.where(starts, self.sentinels[np.maximum(number, 0)], tokens)
        stays = present & (~hidden | starts)
        counts = stays.sum(axis=1)
        text = np.full((len(tokens), width), self.pad_id, np.int32)
        rows, columns = np.nonzero(stays)
        text[rows, (np.cumsum(stays, axis=1) - 1)[rows, columns]] = values[rows, columns]
        text[np.arange(len(tokens)), counts] = self.eos_id
        return text, (np.arange(width)[None, :] <= counts[:, None]).astype(np.int32)


def _segments(total: np.ndarray, count: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Cut `total` [batch] things into `count` [batch] segments, none empty, all ways equally likely.

    Returns their lengths [batch, most segments], zero beyond a row's own. `draws` [batch, >= total] are random numbers.
    """
    places = np.arange(draws.shape[1])[None, :]
    inside = places < total[:, None] - 1  # a cut may be behind each thing but the last
    rank = np.argsort(np.argsort(np.where(inside, draws, 2.0), axis=1), axis=1)
    cuts = inside & (rank < count[:, None] - 1)
    segment: np.ndarray = np.cumsum(cuts, axis=1) - cuts
    lengths = np.zeros((len(total), max(1, int(count.max(initial=0)))), np.int64)
    rows, columns = np.nonzero(places < total[:, None])
    np.add.at(lengths, (rows, segment[rows, columns]), 1)
    return lengths
