"""From logits of starts and ends to answers: the likeliest spans of a question's windows, and whether there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ScoredWindow:
    """What a model says about a window.

    start, end: logits `[length]`. first, last: characters at which tokens begin and end `[length]`, -1 outside the
    context. null: the position of "no answer".
    """

    start: np.ndarray
    end: np.ndarray
    first: np.ndarray
    last: np.ndarray
    null: int


@dataclass(frozen=True)
class SpanSettings:
    """How spans are chosen.

    n_best: starts and ends that are combined in a window, and spans that are kept of a question. max_length: of a span,
    in tokens. negative: whether there may be no answer. threshold: there is none where its score is higher than that of
    the best span by more than this.
    """

    n_best: int = 20
    max_length: int = 30
    negative: bool = False
    threshold: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What is answered to a question.

    text: the answer, empty for none. best: the best text that is not empty. null_odds: the score of "no answer" less
    that of `best`. n_best: the best spans, and with `negative` "no answer", each with its text, logits, and probability
    among them.
    """

    text: str
    best: str
    null_odds: float
    n_best: list[dict[str, Any]]


@dataclass(frozen=True)
class _Spans:
    """Candidates, `[count]` each: characters, and logits."""

    first: np.ndarray
    last: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def score(self) -> np.ndarray:
        return self.start + self.end


def answer(context: str, windows: Sequence[ScoredWindow], settings: SpanSettings) -> Answer:
    """Return the answer that the windows of a question give.

    The score of a span is the sum of its two logits; that of "no answer" the least of all windows, for each window
    without the answer says that it has none. Spans come from the `n_best` likeliest starts and ends of each window;
    where none of these pairs is a span of the context, from all.
    """
    found = _join([_candidates(window, settings) for window in windows])
    if not found.score.size:
        found = _join([_candidates(window, settings, every=True) for window in windows])
    order = np.argsort(-found.score, kind="stable")
    # Some tokenizers count the space before a word as a part of it.
    texts = [context[first:last].strip() for first, last in zip(found.first[order], found.last[order])]
    nulls = [(float(window.start[window.null]), float(window.end[window.null])) for window in windows]
    null = min(nulls, key=lambda pair: pair[0] + pair[1])
    listed: list[dict[str, Any]] = [
        {"text": text, "start_logit": float(found.start[place]), "end_logit": float(found.end[place])}
        for text, place in zip(texts[: settings.n_best], order)
    ]
    if settings.negative:
        listed = _with_null(listed, null, settings.n_best)
    scores = np.array([each["start_logit"] + each["end_logit"] for each in listed])
    weights = np.exp(scores - scores.max()) if listed else scores
    for each, weight in zip(listed, weights / weights.sum()):
        each["probability"] = float(weight)
    best = next((rank for rank, text in enumerate(texts) if text), None)
    if best is None:  # a context of which the tokenizer keeps nothing
        return Answer("", "", 0.0, listed)
    odds = sum(null) - float(found.score[order[best]])
    empty = settings.negative and odds > settings.threshold
    return Answer("" if empty else texts[best], texts[best], odds, listed)


def _with_null(listed: list[dict[str, Any]], null: tuple[float, float], count: int) -> list[dict[str, Any]]:
    """Return the best `count` of spans and "no answer", which is the last where it is not among them."""
    entry = {"text": "", "start_logit": null[0], "end_logit": null[1]}
    ranked = sorted([*listed, entry], key=lambda each: each["start_logit"] + each["end_logit"], reverse=True)
    kept = ranked[:count]
    return kept if any(each is entry for each in kept) else [*kept, entry]


def _candidates(window: ScoredWindow, settings: SpanSettings, *, every: bool = False) -> _Spans:
    """Return the spans of a window, by the likelihood of start and end; of all positions with `every`."""
    start, end = (np.asarray(logits, np.float64) for logits in (window.start, window.end))
    count = len(window.first) if every else settings.n_best
    starts, ends = (np.argsort(-logits, kind="stable")[:count] for logits in (start, end))
    one, two = (grid.ravel() for grid in np.meshgrid(starts, ends, indexing="ij"))
    length = two - one + 1
    inside = (window.first[one] >= 0) & (window.first[two] >= 0)
    fits = inside & (length >= 1) & (length <= settings.max_length)
    one, two = one[fits], two[fits]
    return _Spans(window.first[one], window.last[two], start[one], end[two])


def _join(parts: Sequence[_Spans]) -> _Spans:
    return _Spans(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("first", "last", "start", "end"))
    )
