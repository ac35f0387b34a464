"""text-classification and zero-shot-classification beside what test_pipeline_answers.py compares with Transformers."""

import numpy as np
import pytest

from distaff import pipeline
from distaff.core.errors import DataError, UsageError
from golden import pipeline_cases as golden

STORED = golden.read()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    names = ("bert-nli", "bert-tags", "bert-number")
    return {name: golden.write(name, STORED["keys"][name], folder / name) for name in names}


@pytest.fixture(scope="module")
def classify(folders):
    return pipeline("sentiment-analysis", str(folders["bert-nli"]), batch_size=4)


@pytest.fixture(scope="module")
def judge(folders):
    return pipeline("zero-shot-classification", str(folders["bert-nli"]), batch_size=4)


def test_without_top_k_the_best_alone(classify, folders):
    """In a list for one text, as Transformers has it; more texts have an answer each."""
    every = classify(golden.TEXTS, top_k=None)
    assert classify(golden.TEXTS) == [answer[0] for answer in every]
    one = classify(golden.TEXTS[0], top_k=None)
    assert classify(golden.TEXTS[0]) == classify(golden.TEXTS[0], top_k=1) == one[:1]
    assert list(classify(text for text in golden.TEXTS)) == classify(golden.TEXTS)
    assert classify(golden.PAIRS[0])["label"] == classify(golden.PAIRS)[0]["label"]
    assert classify([]) == []


def test_the_task_is_found(folders):
    found = pipeline(model=str(folders["bert-nli"]))
    assert found.task == "text-classification"


def test_one_of_several_labels_or_each_by_itself(judge):
    labels = ["cats", "Basel", "rest"]
    together = judge(golden.TEXTS[0], labels)
    assert sum(together["scores"]) == pytest.approx(1)
    assert together["scores"] == sorted(together["scores"], reverse=True)
    each = judge(golden.TEXTS[0], candidate_labels=labels, multi_label=True)
    alone = [judge(golden.TEXTS[0], label)["scores"][0] for label in each["labels"]]
    np.testing.assert_allclose(each["scores"], alone, atol=1e-5)
    assert judge(golden.TEXTS, labels)[0]["labels"] == together["labels"]
    assert judge([], labels) == []


def test_texts_over_the_limit(classify, judge):
    """A class of a part is no class of the text; a label is asked about the part that fits."""
    text = "Anna is in Basel " * 8
    with pytest.raises(DataError, match="longer than the 48 of the model: shorten it, or pass truncation=True"):
        classify(text)
    assert classify(text, truncation=True)[0]["score"] > 0
    found = judge(text, "cats, rest")
    assert (found["sequence"], len(found["scores"])) == (text, 2)
    with pytest.raises(DataError, match="of 48 tokens leaves no room for a text in the 48 of the model"):
        judge("a", ["a " * 48], hypothesis_template="{}")
    with pytest.raises(DataError, match="Label 1 holds half of a surrogate pair"):
        judge("a", ["cats", "\ud800"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "at least 1, or None"),
        ({"function_to_apply": "tanh"}, "is none of softmax, sigmoid, none"),
        ({"topk": 1}, "did you mean 'top_k'"),
    ],
)
def test_settings_that_cannot_be(classify, options, message):
    with pytest.raises(UsageError, match=message):
        classify("a", **options)


def test_inputs_that_cannot_be(classify, judge, folders):
    for given in (["a", "b"], {"text": "a", "pair": "b"}, {"text": None}):
        with pytest.raises(DataError, match=r"Input 1 .* is neither a text nor"):
            classify(["a", given])
    with pytest.raises(UsageError, match="needs candidate_labels"):
        judge("a")
    for template in ("no place", "{} and {}", "{label}", "{", "{} {"):
        with pytest.raises(UsageError, match=r"must have one \{\}, where a label belongs"):
            judge("a", "cats", hypothesis_template=template)
    with pytest.raises(UsageError, match="needs a model of entailment, and this one has the classes LABEL_0"):
        pipeline("zero-shot-classification", str(folders["bert-number"]))
