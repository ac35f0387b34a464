"""Answers from logits, and their scores: run_qa.py's post-processing, the official SQuAD scripts, cases by hand."""

import numpy as np
import pytest

from distaff.data.spans import ScoredWindow, SpanSettings, answer
from distaff.tasks._squad_scores import best_thresholds, squad_v1_scores, squad_v2_scores
from golden import question_cases as golden

STORED = golden.read()


def settings_of(given):
    return SpanSettings(
        n_best=given.get("n_best_size", 20),
        max_length=given.get("max_answer_length", 30),
        negative=given.get("version_2_with_negative", False),
        threshold=given.get("null_score_diff_threshold", 0.0),
    )


@pytest.mark.parametrize("name", golden.POSTPROCESSING)
def test_postprocessing_is_that_of_run_qa(name):
    settings, wanted = settings_of(golden.POSTPROCESSING[name]), STORED["postprocessing"][name]
    examples, windows, start, end = golden.scored()
    invented = []
    for example in examples:
        scored = []
        for place, window in enumerate(windows):
            if window["example_id"] == example["id"]:
                first, last = np.array([pair or (-1, -1) for pair in window["offset_mapping"]]).T
                scored.append(ScoredWindow(start[place], end[place], first, last, 0))
        found = answer(example["context"], scored, settings)
        if wanted["nbest_predictions"][example["id"]][0]["text"] == "empty":
            invented.append(example["id"])  # no pair of the likeliest is a span: see below
            continue
        # Here without the spaces around, which some tokenizers count as parts of words.
        assert found.text == wanted["predictions"][example["id"]].strip()
        assert len(found.n_best) == len(wanted["nbest_predictions"][example["id"]])
        for entry, expected in zip(found.n_best, wanted["nbest_predictions"][example["id"]]):
            assert entry == pytest.approx(expected | {"text": expected["text"].strip()}, abs=1e-5)
        if settings.negative:
            assert found.null_odds == pytest.approx(wanted["null_odds"][example["id"]], abs=1e-5)
    assert len(invented) <= len(examples) // 2


def window_of(start, end, context):
    """A window with a null token before the `context`, one character a token."""
    places = np.arange(len(context))
    return ScoredWindow(np.array(start, float), np.array(end, float), np.r_[-1, places], np.r_[-1, places + 1], 0)


def test_an_answer_by_hand():
    window = window_of([1, 0, 5, 0], [1, 0, 0, 4], "abc")
    found = answer("abc", [window], SpanSettings(n_best=2))
    assert found.text == "bc"
    assert [entry["text"] for entry in found.n_best] == ["bc"]
    assert answer("abc", [window], SpanSettings(max_length=1)).text == "b"
    assert found.null_odds == 2 - 9
    assert answer("abc", [window], SpanSettings(negative=True, threshold=-7.0)).text == "bc"
    assert answer("abc", [window], SpanSettings(negative=True, threshold=-7.1)).text == ""


def test_no_answer_is_scored_by_the_window_that_says_it_least():
    sure, unsure = window_of([9, 0, 0], [9, 0, 0], "ab"), window_of([1, 0, 3], [1, 0, 3], "ab")
    found = answer("ab", [sure, unsure], SpanSettings(negative=True))
    assert found.text == "b"
    assert found.null_odds == 2 - 6
    assert answer("ab", [sure], SpanSettings(negative=True)).text == ""


def test_there_is_an_answer_where_the_likeliest_pairs_are_none():
    """The likeliest start stands behind the likeliest end: run_qa.py answers 'empty'."""
    window = window_of([0, 1, 2, 9], [0, 9, 2, 1], "abc")
    for negative in (False, True):
        found = answer("abc", [window], SpanSettings(n_best=1, negative=negative))
        assert found.best == "c"
        assert found.text == "c"


# Scores.

REFERENCES = {
    "a": ["the Normans", "Norman people"],
    "b": ["10th century"],
    "c": ["Zürich-Höngg"],
    "d": [],
    "e": [],
}
ANSWERS = {"a": "Normans.", "b": "in the 10th century", "c": "Basel", "d": "", "e": "Rollo"}


def test_five_cases_by_hand_version_2():
    """Case T79: exact a and d; F1 of b is 2 * 2 / (2 + 3); c and e are wrong."""
    found = squad_v2_scores(ANSWERS, REFERENCES)
    wanted = {"exact": 40.0, "f1": 56.0, "total": 5, "HasAns_exact": 100 / 3, "HasAns_f1": 60.0, "HasAns_total": 3}
    assert found == pytest.approx(wanted | {"NoAns_exact": 50.0, "NoAns_f1": 50.0, "NoAns_total": 2})


def test_thresholds_by_hand():
    """Answered from the least odds on: a gains 1, e costs 1, b gains, c nothing; d has no answer to give."""
    odds = {"a": -3.0, "e": -2.0, "b": 0.5, "c": 1.0, "d": 2.0}
    found = best_thresholds(ANSWERS, REFERENCES, odds)
    # 2 without an answer, 3 with a; after e and b it is 2 (F1: 2.8).
    assert found == pytest.approx({"best_exact": 60, "best_exact_thresh": -3, "best_f1": 60, "best_f1_thresh": -3})
    found = best_thresholds(ANSWERS, REFERENCES, odds | {"e": 3.0})
    assert found == pytest.approx({"best_exact": 60, "best_exact_thresh": -3, "best_f1": 76, "best_f1_thresh": 0.5})


def test_version_1_by_hand():
    answers = {"a": "Normans.", "b": "in the 10th century", "c": "Basel"}
    references = {name: REFERENCES[name] for name in answers}
    assert squad_v1_scores(answers, references) == pytest.approx({"exact_match": 100 / 3, "f1": 60})
    # Without words there is nothing to share: an exact match, and F1 of 0, in the script of version 1.
    assert squad_v1_scores({"a": "the"}, {"a": ["a"]}) == {"exact_match": 100, "f1": 0}
    assert squad_v2_scores({"a": "the"}, {"a": ["a"]})["f1"] == 100


def test_scores_are_the_official_ones():
    references, answers, odds = golden.judged()
    kept = {name: "" if odds[name] > 0.5 else text for name, text in answers.items()}
    assert squad_v2_scores(kept, references) == pytest.approx(official("plain"), abs=1e-9)
    assert best_thresholds(answers, references, odds) == pytest.approx(official("best"), abs=1e-9)


def official(name):
    values = STORED["scores"][name]
    return values if name == "best" else {key: value for key, value in values.items() if not key.startswith("best")}


def test_the_best_threshold_gives_the_best_score():
    references, answers, odds = golden.judged()
    best = best_thresholds(answers, references, odds)
    for name in ("exact", "f1"):
        kept = {key: "" if odds[key] > best[f"best_{name}_thresh"] else text for key, text in answers.items()}
        assert squad_v2_scores(kept, references)[name] == pytest.approx(best[f"best_{name}"])
