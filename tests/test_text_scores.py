"""ROUGE, BLEU and chrF against their packages and against counting by hand."""

import socket

import pytest
from rouge_score import rouge_scorer

from distaff.core.errors import UsageError
from distaff.tasks._text_scores import ROUGE, bleu, rouge

TEXTS = [
    "The cats were running over the hills. They saw red_birds!",
    "Nobody expects it, and running cats run 3 times.",
    "A cat sat.",
]
WANTED = ["Cats ran over a hill. They had seen birds!", "It is expected by nobody; cats run three times.", "A cat sat."]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked for something")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_rouge_is_that_of_the_package_on_ascii():
    own = rouge_scorer.RougeScorer(list(ROUGE[:3]), use_stemmer=True)
    scores = [own.score(wanted, text) for text, wanted in zip(TEXTS, WANTED)]
    found = rouge(TEXTS, WANTED)
    for name in ROUGE[:3]:
        assert found[name] == pytest.approx(100 * sum(score[name].fmeasure for score in scores) / 3)


def test_rouge_by_hand():
    """Three of four and of five words; one of three and of four pairs of words; sentences in another order."""
    found = rouge(["one two three five"], ["one two six three seven"])
    assert found["rouge1"] == pytest.approx(100 * 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))
    assert found["rouge2"] == pytest.approx(100 * 2 * (1 / 3) * (1 / 4) / (1 / 3 + 1 / 4))
    swapped = rouge(["dd ee ff. aa bb cc."], ["aa bb cc. dd ee ff."])
    assert swapped["rougeL"] == pytest.approx(50)
    assert swapped["rougeLsum"] == pytest.approx(100)


def test_rouge_knows_letters_beyond_ascii():
    assert rouge(["Zürich isch schöö"], ["Zürich isch schöö"])["rouge1"] == pytest.approx(100)
    assert rouge(["Zürich"], ["Zurich"])["rouge1"] == 0
    assert rouge(["日本語"], ["日本語"])["rouge1"] == pytest.approx(100)


def test_empty_prediction_scores_nothing():
    """Case T85."""
    assert rouge([""], ["a summary"]) == dict.fromkeys(ROUGE, 0.0)
    assert rouge(["a summary"], [""]) == dict.fromkeys(ROUGE, 0.0)
    half = rouge(["", "a summary"], ["a summary", "a summary"])
    assert half["rouge1"] == pytest.approx(50)
    assert bleu([""], ["ein Satz von vielen Wörtern"]) == {"bleu": 0.0, "chrf": 0.0}


def test_bleu_and_chrf():
    assert bleu(TEXTS, TEXTS) == {"bleu": pytest.approx(100), "chrf": pytest.approx(100)}
    found = bleu(["the cat sat on the mat today"], ["the cat sat on the mat yesterday"])
    # 6 of 7 words, 5 of 6 pairs, 4 of 5 triples, 3 of 4 quadruples; lengths are equal.
    assert found["bleu"] == pytest.approx(100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25)
    assert 0 < found["chrf"] < 100


def test_bleu_splits_what_is_written_without_spaces():
    text, other = "今天天气很好我们去公园", "今天天气很好他们去公园"
    assert bleu([text], [other], language="zh_CN")["bleu"] > 40
    assert bleu([text], [other])["bleu"] < 1
    assert bleu([text], [other], language="ja_XX")["bleu"] > 40


def test_texts_of_unequal_number_are_refused():
    with pytest.raises(UsageError, match="2 predictions and 1 references"):
        rouge(["a", "b"], ["a"])
    with pytest.raises(UsageError, match="cannot be compared"):
        bleu([], [])
