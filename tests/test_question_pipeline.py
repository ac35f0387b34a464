"""question-answering as a call: the answers of PyTorch's pipeline, arguments, long contexts, what is refused."""

import pytest

from distaff import pipeline
from distaff.core.errors import DataError, UsageError
from golden import question_cases as golden

STORED = golden.read()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("questions")
    return {name: golden.write(name, STORED["keys"][name], root / name) for name in golden.MODELS}


@pytest.fixture(scope="module")
def asked(folders):
    """Pipelines by name, loaded once each."""
    return {name: pipeline("question-answering", str(folder)) for name, folder in folders.items()}


@pytest.mark.parametrize("option", golden.OPTIONS)
@pytest.mark.parametrize("model", golden.MODELS)
def test_answers_are_those_of_pytorch(asked, model, option):
    given = golden.OPTIONS[option]
    found = asked[model](golden.EXAMPLES, **given)
    for answers, wanted in zip(found, STORED["answers"][model][option], strict=True):
        # Transformers has an answer for a list of one.
        pairs = zip(*([each] if isinstance(each, dict) else each for each in (answers, wanted)), strict=True)
        for answer, expected in pairs:
            assert answer == pytest.approx(expected, abs=1e-4)


def test_a_question_may_be_given_in_several_ways(asked):
    ask, one, two = asked["bert"], *golden.EXAMPLES[:2]
    answer = ask(question=one["question"], context=one["context"])
    assert answer["answer"] == one["context"][answer["start"] : answer["end"]]
    assert ask(one) == ask(one["question"], one["context"]) == answer
    assert ask([one]) == ask(iter([one])) == ask(question=[one["question"]], context=[one["context"]]) == [answer]
    other = ask(question=two["question"], context=one["context"])
    for found, wanted in zip(ask(question=[one["question"], two["question"]], context=one["context"]), (answer, other)):
        assert found == pytest.approx(wanted, abs=1e-6)
    first, second = ask(question=one["question"], context=(one["context"], two["context"]))
    assert first == pytest.approx(answer, abs=1e-6)
    assert second["answer"] in two["context"]


def test_an_answer_does_not_depend_on_its_company(asked, folders):
    for model in golden.MODELS:
        together = asked[model](golden.EXAMPLES, top_k=3, max_seq_len=64, doc_stride=16)
        alone = pipeline(
            "question-answering", str(folders[model]), batch_size=1, top_k=3, max_seq_len=64, doc_stride=16
        )
        for example, answers in zip(golden.EXAMPLES, together):
            for one, two in zip(alone(example), answers, strict=True):
                assert one == pytest.approx(two, abs=1e-5)


def test_a_long_question_is_cut_and_the_context_read_whole(asked):
    ask, story = asked["bert"], golden.STORY
    answers = ask(question="what " * 500, context=story * 3, top_k=1000, max_seq_len=48)
    assert max(answer["end"] for answer in answers) == len((story * 3).rstrip())
    short = ask(question="what did he do", context=story, max_question_len=2)
    assert short == ask(question="what did", context=story)


def test_context_before_question(asked):
    """Where the tokenizer pads on the left; Transformers looks for answers in the question there."""
    tokenizer = golden.tokenizer("bert")
    tokenizer.padding_side = "left"
    ask = pipeline("question-answering", asked["bert"].model, tokenizer=tokenizer)
    for example in golden.EXAMPLES:
        found = ask(example, top_k=500)
        assert sum(answer["score"] for answer in found) <= 1 + 1e-6
        for answer in found:
            assert answer["answer"] == example["context"][answer["start"] : answer["end"]] != ""


@pytest.mark.parametrize(
    ("inputs", "named", "sentence"),
    [
        ((), {"question": "who", "context": ""}, "the context is ''"),
        ((), {"question": "who"}, "The input has no context"),
        (
            ([{"question": "who", "context": "Ada"}, {"question": None, "context": "Ada"}],),
            {},
            "Input 1 has no question",
        ),
        ((["who"],), {}, "Input 0 is of type str"),
        ((), {"question": "who", "context": "\x00\x00"}, "context without tokens"),
    ],
)
def test_inputs_that_are_refused(asked, inputs, named, sentence):
    with pytest.raises(DataError, match=sentence):
        asked["bert"](*inputs, **named)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"topk": 2}, "did you mean 'top_k'"),
        ({"top_k": 0}, "top_k is 0"),
        ({"doc_stride": 500}, "doc_stride is 500: windows of 192"),
        ({"max_seq_len": 4}, "hold no question and context"),
        ({"question": ["who", "what"], "context": ["Ada"]}, "2 questions and 1 contexts"),
    ],
)
def test_calls_that_are_refused(asked, named, sentence):
    with pytest.raises(UsageError, match=sentence):
        asked["bert"](**{"question": "who", "context": "Ada ran.", **named})
