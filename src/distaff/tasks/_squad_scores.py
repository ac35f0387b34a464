"""Exact match and F1 of answers, equal to the official SQuAD scripts, version 1.1 and 2.0.

Both in percent. Texts are compared in lower case, without punctuation and the articles a, an, the; F1 counts the words
that they share; of several references the best counts.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Answers = Mapping[str, str]
References = Mapping[str, Sequence[str]]


def squad_v1_scores(predictions: Answers, references: References) -> dict[str, float]:
    """Return `exact_match` and `f1` of the answers by id, each of which has references."""
    exact = {name: _best(_exact, text, references[name]) for name, text in predictions.items()}
    f1 = {name: _best(_f1, text, references[name]) for name, text in predictions.items()}
    return {"exact_match": _percent(exact.values()), "f1": _percent(f1.values())}


def squad_v2_scores(predictions: Answers, references: References) -> dict[str, float]:
    """Return `exact` and `f1` of all answers by id, and of those with (`HasAns_`) and without reference (`NoAns_`).

    An empty answer is right where there is no reference, and only there.
    """
    exact, f1 = _raw(predictions, references)
    parts = {
        "": list(predictions),
        "HasAns_": [name for name in predictions if references[name]],
        "NoAns_": [name for name in predictions if not references[name]],
    }
    scores: dict[str, float] = {}
    for prefix, names in parts.items():
        if names:
            scores[f"{prefix}exact"] = _percent([exact[name] for name in names])
            scores[f"{prefix}f1"] = _percent([f1[name] for name in names])
            scores[f"{prefix}total"] = len(names)
    return scores


def best_thresholds(answers: Answers, references: References, null_odds: Mapping[str, float]) -> dict[str, float]:
    """Return the best `exact` and `f1` that a threshold of `null_odds` gives, and which.

    answers: what is answered below the threshold. Above it the answer is empty. 0 answers nothing but what has odds
    below it, and is the threshold too where no answer at all is best, as in the official script.
    """
    exact, f1 = _raw(answers, references)
    scores: dict[str, float] = {}
    for name, values in (("exact", exact), ("f1", f1)):
        total, threshold = _best_threshold(answers, values, references, null_odds)
        scores[f"best_{name}"] = 100 * total / len(values)
        scores[f"best_{name}_thresh"] = threshold
    return scores


def _best_threshold(
    answers: Answers, values: Mapping[str, float], references: References, odds: Mapping[str, float]
) -> tuple[float, float]:
    """Return the highest sum of `values`, and the odds up to which questions are answered for it."""
    # With no answer at all, those without reference are right.
    total: float = sum(not references[name] for name in answers)
    best, threshold = total, 0.0
    for name in sorted(odds, key=lambda each: odds[each]):
        total += values[name] if references[name] else -1 if answers[name] else 0
        if total > best:
            best, threshold = total, odds[name]
    return best, threshold


def _raw(predictions: Answers, references: References) -> tuple[dict[str, float], dict[str, float]]:
    """Return exact match and F1 of each answer, version 2."""
    exact, f1 = {}, {}
    for name, text in predictions.items():
        # What is nothing but articles and punctuation is no reference; without any, the empty text is one.
        wanted = [reference for reference in references[name] if _normal(reference)] or [""]
        exact[name] = _best(_exact, text, wanted)
        f1[name] = _best(_f1_or_nothing, text, wanted)
    return exact, f1


def _best(score: Callable[[str, str], float], text: str, references: Sequence[str]) -> float:
    return max(score(text, reference) for reference in references)


def _exact(text: str, reference: str) -> float:
    return float(_normal(text) == _normal(reference))


def _f1(text: str, reference: str) -> float:
    words, wanted = _normal(text).split(), _normal(reference).split()
    shared = (Counter(words) & Counter(wanted)).total()
    return 2 * shared / (len(words) + len(wanted)) if shared else 0.0


def _f1_or_nothing(text: str, reference: str) -> float:
    """Return F1, which is 1 where both texts have no words."""
    words, wanted = _normal(text).split(), _normal(reference).split()
    return _f1(text, reference) if words and wanted else float(words == wanted)


def _normal(text: str) -> str:
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _percent(values) -> float:
    return 100 * sum(values) / len(values)
