"""Spans of tags, and how many of them a tagger finds: the counts of `seqeval` in its default mode.

Tags are `B-`, `I-`, `E-`, `S-` and a type, or `O`; a span that begins with `I-` is one, as in conlleval.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

Span = tuple[str, int, int]


def spans_of(tags: Sequence[str]) -> list[Span]:
    """Return `(type, first word, last word)` of each span."""
    found = []
    start, last, last_kind = 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, kind = tag[0], tag[1:].split("-", maxsplit=1)[-1] or "_"
        changed = kind != last_kind
        if last in "ES" or (last in "BI" and prefix in "BSO") or (last not in "O." and changed):
            found.append((last_kind, start, place - 1))
        if prefix in "BS" or (last in "ESO" and prefix in "EI") or (prefix not in "O." and changed):
            start = place
        last, last_kind = prefix, kind
    return found


def span_scores(
    wanted: Iterable[Sequence[str]], found: Iterable[Sequence[str]], *, by_type: bool = False
) -> dict[str, float]:
    """Return precision, recall and F1 of the spans of all sentences, and the accuracy of the tags of all words.

    With `by_type` also `<type>_precision`, `..._recall`, `..._f1` and `..._number` (of spans that are wanted).
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # both, found, wanted
    words = hits = 0
    for right, given in zip(wanted, found, strict=True):
        words += len(right)
        hits += sum(one == other for one, other in zip(right, given, strict=True))
        sets = set(spans_of(right)), set(spans_of(given))
        for place, spans in enumerate((sets[0] & sets[1], sets[1], sets[0])):
            for kind, *_ in spans:
                counts[kind][place] += 1
    scores = _scores([sum(each) for each in zip(*counts.values())] or [0, 0, 0])
    scores["accuracy"] = hits / words if words else 0.0
    for kind in sorted(counts) if by_type else ():
        scores |= {f"{kind}_{name}": value for name, value in _scores(counts[kind]).items()}
        scores[f"{kind}_number"] = counts[kind][2]
    return scores


def _scores(counts: Sequence[int]) -> dict[str, float]:
    both, found, wanted = counts
    precision, recall = both / found if found else 0.0, both / wanted if wanted else 0.0
    f1 = 2 * precision * recall / (precision + recall) if both else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
