"""question-answering as a call: the answers of PyTorch's pipeline, arguments, long contexts, what is refused."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from distaff import pipeline
from distaff.cli import main
from distaff.core.errors import DataError, UsageError
from golden import question_cases as golden
from recipe_cases import one_line

STORED = golden.read()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("questions")
    return {name: golden.write(name, STORED["keys"][name], root / name) for name in golden.MODELS}


@pytest.fixture(scope="module")
def asked(folders):
    """Pipelines by name, loaded once each."""
    return {name: pipeline("question-answering", str(folder)) for name, folder in folders.items()}


# Where spaces are tokens, PyTorch's pieces of words may end in one, and what says the same adds up differently.
CASES = [(name, option) for name in golden.MODELS for option in golden.OPTIONS if name == "bert" or option != "pieces"]


@pytest.mark.parametrize(("model", "option"), CASES)
def test_answers_are_those_of_pytorch(asked, model, option):
    found = asked[model](golden.EXAMPLES, **golden.OPTIONS[option])
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
    assert ask([one]) == list(ask(iter([one]))) == ask(question=[one["question"]], context=[one["context"]]) == [answer]
    other = ask(question=two["question"], context=one["context"])
    for found, wanted in zip(ask(question=[one["question"], two["question"]], context=one["context"]), (answer, other)):
        assert found == pytest.approx(wanted, abs=1e-6)
    first, second = ask(question=one["question"], context=(one["context"], two["context"]))
    assert first == pytest.approx(answer, abs=1e-6)
    assert second["answer"] in two["context"]
    assert ask([]) == list(ask(iter([]))) == ask(question=[], context=[]) == []


def test_an_answer_does_not_depend_on_its_company(asked, folders):
    for model in golden.MODELS:
        together = asked[model](golden.EXAMPLES, top_k=3, max_seq_len=64, doc_stride=16)
        alone = pipeline(
            "question-answering", str(folders[model]), batch_size=1, top_k=3, max_seq_len=64, doc_stride=16
        )
        for example, answers in zip(golden.EXAMPLES, together):
            for one, two in zip(alone(example), answers, strict=True):
                assert one == pytest.approx(two, abs=1e-5)
        said = asked[model](golden.EXAMPLES, top_k=3, max_seq_len=64, doc_stride=16, batch_size=2)
        assert [[each["answer"] for each in answers] for answers in said] == [
            [each["answer"] for each in answers] for answers in together
        ]


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


def test_no_answer_begins_with_a_space(asked):
    """Where spaces are parts of words, as with SentencePiece; Transformers gives ' red house'."""
    words = [*golden.SPECIALS, "▁", *("▁" + word for word in golden.WORDS.split()), *"abcdefghijklmnopqrstuvwxyz"]
    core = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=1))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2), add_prefix_space=False)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), golden.SPECIALS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=60, model_input_names=["input_ids", "attention_mask"], **names
    )
    example = {"question": "who ran", "context": "the red house ran to the green river"}
    for words in (True, False):
        found = pipeline("question-answering", asked["roberta"].model, tokenizer=tokenizer, align_to_words=words)(
            example, top_k=40
        )
        assert len(found) > 10
        for answer in found:
            assert answer["answer"] == example["context"][answer["start"] : answer["end"]] == answer["answer"].strip()


@pytest.mark.parametrize(
    ("inputs", "named", "sentence"),
    [
        ((), {"question": "who", "context": ""}, "the context is ''"),
        ((), {"question": "who"}, "Input 0 has no context"),
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


# On the command line.


def test_a_question_on_the_command_line(asked, folders, capsys):
    example = golden.EXAMPLES[0]
    words = [str(folders["bert"]), example["question"], example["context"], "--top_k", "2"]
    assert main(["predict", "question-answering", *words]) == 0
    shown = capsys.readouterr().out
    for answer in asked["bert"](example, top_k=2):
        assert f"{answer['answer']}  {answer['score']:.3f}  ({answer['start']}-{answer['end']})" in shown
    assert main(["predict", "question-answering", *words, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["question"] == example["question"]
    assert [each["answer"] for each in line["answers"]] == [each["answer"] for each in asked["bert"](example, top_k=2)]


def test_a_file_of_questions_gives_a_line_each_in_order(asked, folders, capsys, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{n}", **each}) + "\n" for n, each in enumerate(golden.EXAMPLES)))
    words = ["--file", str(path), "--max_seq_len", "64", "--doc_stride", "16", "--handle_impossible_answer", "--json"]
    assert main(["predict", "question-answering", str(folders["roberta"]), *words]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = asked["roberta"](golden.EXAMPLES, max_seq_len=64, doc_stride=16, handle_impossible_answer=True)
    assert [line["id"] for line in lines] == [f"q{number}" for number in range(5)]
    for line, answer in zip(lines, wanted, strict=True):
        assert line["answers"][0] == pytest.approx(answer, abs=1e-6)


def test_a_file_is_read_as_it_is_asked_for(asked, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in golden.EXAMPLES))
    for found, wanted in zip(asked["bert"](path), asked["bert"](golden.EXAMPLES), strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["who"], 2, "There is no context"),
        ([], 2, "There is no question"),
        (["who", "Ada", "--file", "x.jsonl"], 2, "leave --file out"),
        (["who", "Ada", "--top_k", "0"], 2, "top_k is 0"),
        (["--file", "missing.jsonl"], 1, "There is no file 'missing.jsonl'"),
        (["--file", "{latin}"], 1, "line 1: byte 0xfc at offset"),
    ],
)
def test_commands_that_are_refused(folders, capsys, tmp_path, words, code, sentence):
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"question": "who", "context": "Zürich"}\n'.encode("latin-1"))
    filled = [word.format(latin=latin) for word in words]
    assert main(["predict", "question-answering", str(folders["bert"]), *filled]) == code
    assert sentence in one_line(capsys)
