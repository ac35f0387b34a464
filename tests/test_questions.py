"""Questions from files and sets, and their windows: forms, what is refused with its place, positions of answers."""

import json
from itertools import pairwise

import datasets
import numpy as np
import pytest

from distaff.core.errors import DataError, UsageError
from distaff.data.questions import load_questions, unanswered
from distaff.data.windows import IGNORED, WindowCollate, cut_windows, tokenize_questions
from golden import question_cases as golden

CONTEXT = "Ada ran. Zürich-Höngg saw Ada."
ROWS = [
    {"id": "q1", "question": "Who ran?", "context": CONTEXT, "answers": {"text": ["Ada"], "answer_start": [0]}},
    {"id": "q2", "question": "Where?", "context": CONTEXT, "answers": {"text": ["Zürich-Höngg"], "answer_start": [9]}},
    {"id": "q3", "question": "Who saw it?", "context": "Nobody.", "answers": {"text": [], "answer_start": []}},
]


def squad(rows=ROWS):
    """The rows as an article of SQuAD's JSON."""
    paragraphs = []
    for row in rows:
        texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts)]
        asked = {"id": row["id"], "question": row["question"], "answers": answers, "is_impossible": not texts}
        paragraphs.append({"context": row["context"], "qas": [asked]})
    return {"version": "v2.0", "data": [{"title": "Ada", "paragraphs": paragraphs}]}


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content))
    else:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    return str(path)


def as_lists(rows):
    """The rows with a list of objects for answers."""
    return [
        {**row, "answers": [dict(zip(("text", "answer_start"), pair)) for pair in zip(*row["answers"].values())]}
        for row in rows
    ]


@pytest.fixture
def read(tmp_path):
    def read(files, **options):
        return load_questions(files=files, cache_dir=tmp_path / "cache", **options)

    return read


FORMS = {
    "squad.json": squad(),
    "flat.json": {"data": ROWS},
    "rows.json": ROWS,
    "flat.jsonl": ROWS,
    "lists.jsonl": as_lists(ROWS),
    "strings.jsonl": [{**row, "answers": json.dumps(row["answers"])} for row in ROWS],
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_rows(read, tmp_path, name):
    found = read(write(tmp_path / name, FORMS[name]))
    for row, wanted in zip(found, ROWS, strict=True):
        assert {key: row[key] for key in ("id", "question", "context")} == {
            key: wanted[key] for key in row if key in wanted
        }
        assert {"text": row["texts"], "answer_start": row["starts"]} == wanted["answers"]
    assert unanswered(found) == 1


def test_hub_sets_parquet_and_csv_are_the_same(read, tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    datasets.Dataset.from_list([{**row, "answers": json.dumps(row["answers"])} for row in ROWS]).to_csv(
        tmp_path / "rows.csv"
    )
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "set")
    wanted = read(write(tmp_path / "squad.json", squad()))[:]
    assert read(str(tmp_path / "rows.parquet"))[:] == wanted
    assert read(str(tmp_path / "rows.csv"))[:] == wanted
    assert read(None, dataset_name=str(tmp_path / "set"))[:] == wanted


def test_rows_without_ids_are_numbered_in_all_files(read, tmp_path):
    rows = [{name: row[name] for name in ("question", "context", "answers")} for row in ROWS]
    paths = [write(tmp_path / name, rows) for name in ("a.jsonl", "b.jsonl")]
    assert read(paths[0])["id"] == ["1", "2", "3"]
    assert len(set(read(paths)["id"])) == 6


def test_a_row_to_predict_needs_no_answers(read, tmp_path):
    rows = [{name: row[name] for name in ("id", "question", "context")} for row in ROWS]
    path = write(tmp_path / "test.jsonl", rows)
    assert read(path, need_answers=False)["texts"] == [None] * 3
    with pytest.raises(DataError, match=r"test.jsonl' has no answers"):
        read(path)


def test_a_changed_file_is_read_again(read, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert len(read(path)) == 3
    write(tmp_path / "rows.jsonl", ROWS[:2])
    assert len(read(path)) == 2


def changed(number, **fields):
    return [{**row, **(fields if place == number else {})} for place, row in enumerate(ROWS)]


def answered(text, start):
    return {"answers": {"text": [text], "answer_start": [start]}}


WRONG = {
    "empty context": (changed(1, context=" \n"), r"line 2: the context is empty"),
    "null question": (changed(0, question=None), r"line 1: the question is empty"),
    "number": (changed(0, question=7), r"line 1: the question is of type int"),
    "offset": (changed(1, **answered("Ada", 8)), r"line 2: the answer 'Ada' is not at answer_start 8 .* at 0"),
    "nearest": (changed(1, **answered("Ada", 25)), r"line 2: .* 25 of the context, where ' Ad' stands; .* at 26"),
    "nowhere": (changed(0, **answered("Eve", 0)), r"line 1: the answer 'Eve' .* it stands nowhere"),
    "negative": (changed(0, **answered("Ada", -1)), r"line 1: the answer 'Ada' is not at answer_start -1"),
    "beyond": (changed(0, **answered("Ada", 4000)), r"line 1: the answer 'Ada' is not at answer_start 4000"),
    "empty answer": (changed(2, **answered("", 0)), r"line 3: an answer is empty"),
    "counts": (changed(0, answers={"text": ["Ada"], "answer_start": []}), r"line 1: 1 answer texts and 0 offsets"),
    "types": (changed(0, **answered("Ada", "0")), r"line 1: an answer needs a string and a whole number"),
    "no offsets": (changed(0, answers={"text": ["Ada"]}), r"line 1: 'answer_start of the answers' is missing"),
    "null answers": (changed(0, answers=None), r"line 1: the answers are null"),
    "bad JSON": (changed(0, answers="{"), r"line 1: the answers are not valid JSON"),
    "same id": (changed(2, id="q1"), r"line 3: the id 'q1' is that of .*line 1 too"),
    "missing": ([*ROWS, {"id": "q4", "question": "x", "answers": []}], r"line 4: no column 'context'"),
    "other form": ([{"text": "x"}], r"rows.jsonl' has no question, context, answers"),
    "Latin-1": (
        json.dumps(ROWS[1], ensure_ascii=False).encode("latin-1"),
        r"line 1: byte 0xfc at offset \d+ is not UTF-8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_one_sentence(read, tmp_path, name):
    content, sentence = WRONG[name]
    with pytest.raises(DataError, match=sentence) as raised:
        read(write(tmp_path / "rows.jsonl", content))
    assert "rows.jsonl" in str(raised.value)
    assert "\n" not in str(raised.value)


def nested(change):
    content = squad()
    change(content["data"][0]["paragraphs"])
    return content


ARTICLES = {
    "context": (lambda found: found[1].pop("context"), "article 1, paragraph 2: no 'context'"),
    "question": (lambda found: found[1]["qas"][0].pop("question"), "paragraph 2, question 1: no 'question'"),
    "id": (lambda found: found[1]["qas"][0].pop("id"), "paragraph 2, question 1: no 'id'"),
    "answers": (lambda found: found[1]["qas"][0].pop("answers"), "paragraph 2, question 1: no 'answers'"),
    "qas": (lambda found: found[2].update(qas=None), "paragraph 3: no 'qas'"),
    "offset": (
        lambda found: found[1]["qas"][0]["answers"][0].update(answer_start=10),
        r"paragraph 2, question 1 \('q2'\): the answer 'Zürich-Höngg' is not at answer_start 10",
    ),
    "impossible": (
        lambda found: found[0]["qas"][0].update(is_impossible=True),
        r"question 1 \('q1'\): is_impossible is true, and there is the answer 'Ada'",
    ),
    "paragraph": (lambda found: found.append("text"), "paragraph 4: no 'context', only a str"),
}


@pytest.mark.parametrize("name", ARTICLES)
def test_what_is_wrong_in_an_article_is_found(read, tmp_path, name):
    change, sentence = ARTICLES[name]
    with pytest.raises(DataError, match=f"squad.json, article 1, .*{sentence}|squad.json, {sentence}"):
        read(write(tmp_path / "squad.json", nested(change)))


def test_a_file_without_questions_is_refused(read, tmp_path):
    with pytest.raises(DataError, match="holds no question"):
        read(write(tmp_path / "squad.json", {"data": [{"paragraphs": []}]}))


# Windows.


def windows_of(tokenizer, question, context, answers, *, tmp_path, length, stride):
    row = {"id": "q", "question": question, "context": context, "answers": answers}
    dataset = load_questions(files=write(tmp_path / "one.jsonl", [row]), cache_dir=tmp_path / "cache")
    return tokenize_questions(dataset, tokenizer=tokenizer, max_length=length, stride=stride, token_types=True)


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_answer_in_later_windows(tmp_path, side):
    """Case T81: every window that holds tokens 35 to 37 of 60 has their positions in it, every other says null."""
    tokenizer = golden.tokenizer("bert")
    tokenizer.padding_side = side
    words = [*(["cat"] * 35), "saw", "red", "green", *(["dog"] * 22)]
    context = " ".join(words)
    answer = {"text": ["saw red green"], "answer_start": [context.index("saw")]}
    rows = windows_of(tokenizer, "who", context, answer, tmp_path=tmp_path, length=24, stride=10)
    assert len(rows) == 5
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    holding = 0
    for row in rows:
        assert row["null"] == row["input_ids"].index(tokenizer.cls_token_id) == 0
        whole = [ids["saw"], ids["red"], ids["green"]]
        places = [place for place in range(len(row["input_ids"])) if row["input_ids"][place : place + 3] == whole]
        if places:
            holding += 1
            assert (row["start"], row["end"]) == (places[0], places[0] + 2)
            assert context[row["first"][row["start"]] : row["last"][row["end"]]] == "saw red green"
        else:
            assert row["start"] == row["end"] == 0
    assert holding == 2


@pytest.mark.parametrize("model", golden.MODELS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_are_those_of_the_tokenizer(model, side):
    tokenizer = golden.tokenizer(model)
    tokenizer.padding_side = side
    pairs = [(each["question"], each["context"]) for each in golden.EXAMPLES]
    found, cut = cut_windows(tokenizer, *zip(*pairs), max_length=64, stride=16)
    assert not cut
    ordered = pairs if side == "right" else [pair[::-1] for pair in pairs]
    wanted = tokenizer(
        *map(list, zip(*ordered)),
        truncation="only_second" if side == "right" else "only_first",
        max_length=64,
        stride=16,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    assert [window.encoding.ids for window in found] == wanted["input_ids"]
    assert [window.encoding.type_ids for window in found] == wanted["token_type_ids"]
    assert [window.row for window in found] == wanted["overflow_to_sample_mapping"]
    assert [window.offsets.tolist() for window in found] == [list(map(list, row)) for row in wanted["offset_mapping"]]
    # The tokenizer is as it was.
    assert len(tokenizer("a " * 300, verbose=False)["input_ids"]) > 300


def test_a_question_is_cut_where_it_leaves_no_room():
    tokenizer = golden.tokenizer("bert")
    questions = ["who " * 27, "who " * 28, "who " * 3]
    contexts = ["cat " * 100] * 3
    windows, cut = cut_windows(tokenizer, questions, contexts, max_length=40, stride=16)
    assert cut == {1}  # 40 less 3 special tokens less a quarter for the context is 27
    assert max(len(window.encoding) for window in windows) == 40
    for row in range(3):
        pieces = [window for window in windows if window.row == row]
        assert all(window.context.sum() >= 10 for window in pieces[:-1])
        ends = [window.offsets[window.context] for window in pieces]
        assert ends[0][0, 0] == 0
        assert ends[-1][-1, 1] == 399
        assert all(later[0, 0] <= earlier[-1, 1] + 1 for earlier, later in pairwise(ends))


def test_positions_follow_the_answer_without_its_spaces(tmp_path):
    tokenizer = golden.tokenizer("bert")
    answer = {"text": [" red house "], "answer_start": [7]}
    rows = windows_of(tokenizer, "  who", "Ada saw red house it", answer, tmp_path=tmp_path, length=40, stride=8)
    row = rows[0]
    assert (row["first"][row["start"]], row["last"][row["end"]]) == (8, 17)


def test_a_batch_is_padded_by_position(tmp_path):
    tokenizer = golden.tokenizer("bert")
    rows = [{**ROWS[0]}, {**ROWS[2]}, {"id": "q4", "question": "Who?", "context": "Ada ran.", "answers": None}]
    path = write(tmp_path / "rows.jsonl", rows)
    dataset = load_questions(files=path, cache_dir=tmp_path / "cache", need_answers=False)
    windows = tokenize_questions(dataset, tokenizer=tokenizer, max_length=60, stride=8, token_types=True)
    table = windows.with_format("arrow")[:]
    batch = WindowCollate(0)(table, indices=np.arange(3), weights=np.ones(3, np.float32), epoch=0, length=60)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["token_type_ids"].shape == (3, 60)
    assert batch["attention_mask"].sum(1).tolist() == [len(ids) for ids in windows["input_ids"]]
    assert batch["start"][1:].tolist() == batch["end"][1:].tolist() == [0, IGNORED]


def test_lengths_that_no_window_has(tmp_path):
    for length, stride, sentence in ((4, 0, "hold no question"), (20, 20, "cannot share"), (20, -1, "cannot share")):
        with pytest.raises(UsageError, match=sentence):
            windows_of(golden.tokenizer("bert"), "who", "Ada", [], tmp_path=tmp_path, length=length, stride=stride)
