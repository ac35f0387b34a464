"""Sentences with tags: files and their faults, pieces with labels, windows, spans."""

import json

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distaff.core.errors import DataError, UsageError
from distaff.data.pieces import windows
from distaff.data.sentences import TagColumns, check_tags, labels_of, load_sentences
from distaff.data.tag_scores import span_scores, spans_of
from distaff.data.tagging import TagCollate, tags_of_words, tokenize_sentences
from golden import cases as golden
from golden.tag_cases import SCHEMES, drawn
from text_cases import tokenizer_of

ODD = ["Ada", "\n", "visited", "", "Zürich-Höngg", "🙂"]
ODD_TAGS = ["B-PER", "O", "O", "O", "B-LOC", "O"]
TO_PREDICT = TagColumns(need_tags=False, keep_blank=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path, columns=None):
    found = load_sentences(columns or TagColumns(), files=str(path))
    return list(zip(found["words"], found["tags"]))


def sentencepiece():
    """Like XLM-R's: a word begins with a mark, which is a piece even before a word that is not known."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁Ada", -1.0), ("▁visited", -1.0), ("▁Z", -2.0), ("ü", -2.0)]
    backend = Tokenizer(models.Unigram([*pieces, *((letter, -3.0) for letter in "richHöngg-")], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


def test_columns_and_rows_hold_the_same(tmp_path):
    wanted = [(["Ada", "\xa0", "Basel"], ["B-PER", "O", "B-LOC"]), (["Hi"], ["O"])]
    for name, content in {
        "tabs.conll": "Ada\tB-PER\n\xa0\tO\nBasel\tB-LOC\n\n\nHi\tO\n",
        "windows.txt": "\ufeffAda B-PER\r\n\xa0 O\r\nBasel B-LOC\r\n\r\nHi O",
        "four.tsv": "-DOCSTART- -X- -X- O\n\nAda NNP B-NP B-PER\n\xa0 : O O\nBasel NNP B-NP B-LOC\n\nHi UH O O\n",
        "rows.jsonl": "\n".join(json.dumps({"id": 1, "tokens": words, "ner_tags": tags}) for words, tags in wanted),
        "rows.json": json.dumps([{"words": words, "labels": tags} for words, tags in wanted]),
    }.items():
        assert read(write(tmp_path / name, content)) == wanted, name
    four = TagColumns(tags="1", task="pos")
    assert read(tmp_path / "four.tsv", four)[1] == (["Hi"], ["UH"])
    with pytest.raises(UsageError, match="which one holds the tags of 'pos'"):
        read(tmp_path / "four.tsv", TagColumns(task="pos"))
    with pytest.raises(UsageError, match="number from 0 to 3"):
        read(tmp_path / "four.tsv", TagColumns(tags="ner"))


def test_sets_of_the_hub_give_names_of_their_tags(tmp_path):
    names = datasets.ClassLabel(names=["O", "B-PER"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(names)})
    rows = {"tokens": [["Ada", "went"], [], ["x"]], "ner_tags": [[1, 0], [], [0]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    found = load_sentences(TagColumns(), dataset_name=str(tmp_path / "set"))
    assert found["tags"][:] == [["B-PER", "O"], ["O"]]
    rows["ner_tags"][2] = [-1]
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "secret")
    assert load_sentences(TO_PREDICT, dataset_name=str(tmp_path / "secret"))["tags"][2] is None
    with pytest.raises(DataError, match=r"row 3: the tag -1 has no name"):
        load_sentences(TagColumns(), dataset_name=str(tmp_path / "secret"))


def test_every_row_has_an_answer_where_answers_are_asked_for(tmp_path):
    rows = [{"tokens": ["a"]}, {"tokens": []}, {"tokens": ["b", "c"]}]
    path = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    assert [words for words, _ in read(path, TO_PREDICT)] == [["a"], [], ["b", "c"]]
    path = write(tmp_path / "words.conll", "a\n\nb\nc\n")
    assert read(path, TO_PREDICT) == [(["a"], None), (["b", "c"], None)]
    with pytest.raises(DataError, match="has words and no tags"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.conll", "Ada B-PER\nwent\n", r"a.conll, line 2: 1 column\(s\) where line 1 has 2"),
        ("a.conll", "Ada\tB-PER\nwent\t\n", "line 2: the word 'went' has no tag"),
        ("a.conll", "Ada O\n\nZ\xfcrich O\n".encode("latin-1"), "line 3: byte 0xfc at offset 8 is not UTF-8"),
        ("a.conll", "\n  \n\t\n", "has no sentence: 0 blank rows"),
        ("a.conll", "", "is empty"),
        ("a.csv", "a,b\n", "is none of .conll"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', "line 1: 2 words and 1 tags"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n\n{"tokens": "b", "tags": ["O"]}', "line 3: 'tokens' is of type str"),
        ("a.jsonl", '{"tokens": ["a", null], "tags": ["O", "O"]}', "line 1: 'tokens' holds None"),
        ("a.jsonl", '{"tokens": ["a", 7], "tags": ["O", "O"]}', "line 1: 'tokens' holds 7"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [null]}', "line 1: the tag of 'a' is None"),
        ("a.jsonl", '{"tokens": [], "tags": []}\n{"tokens": null, "tags": null}', "no sentence: 2 blank rows"),
        ("a.jsonl", '{"text": "a b"}', "has no column of words: it has text"),
        ("a.jsonl", '{"tokens": ["a"]}', "has no column of tags: it has tokens; name one by --label_column_name"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["b"]}', "line 2: no column 'tags'"),
        ("a.jsonl", '{"tokens": ["\\ud83d"], "tags": ["O"]}', "line 1: half of a surrogate pair"),
        ("a.json", '[{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a"], "tags": ["\\udc00"]}]', "row 2: half of a surrogate pair"),
    ],
)  # fmt: skip
def test_faults_are_one_sentence_with_their_place(tmp_path, name, content, said):
    with pytest.raises((DataError, UsageError), match=said):
        read(write(tmp_path / name, content))


def test_unknown_tags_are_named_with_their_place(tmp_path):
    path = write(tmp_path / "a.conll", "Ada\tB-PER\n\nin\tO\nUri\tS-LOC\n")
    found = load_sentences(TagColumns(), files=str(path))
    assert labels_of(found) == ["B-PER", "O", "S-LOC"]
    check_tags(found, ["O", "S-LOC", "B-PER"])
    with pytest.raises(DataError, match=r"a.conll, line 3, word 2 \('Uri'\): the tag 'S-LOC' .* scheme is another"):
        check_tags(found, ["O", "B-PER", "B-LOC", "I-LOC"])
    with pytest.raises(DataError, match=r"word 1 \('Ada'\): the tag 'B-PER' .* correct it, or train"):
        check_tags(found, ["O", "S-LOC"])


# Pieces (T76).


def odd_sentence(tags=ODD_TAGS):
    return datasets.Dataset.from_dict({"words": [ODD], "tags": [tags], "place": ["here"]})


@pytest.mark.parametrize(
    ("make", "vanished"),
    [(lambda: tokenizer_of("bert"), {1, 3}), (lambda: tokenizer_of("roberta"), {3}), (sentencepiece, {3})],
    ids=["wordpiece", "byte-level", "sentencepiece"],
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_labels_stand_on_the_right_word_whatever_vanishes(make, vanished, everywhere, caplog):
    tokenizer, labels = make(), ["B-LOC", "B-PER", "I-LOC", "O"]
    rows = tokenize_sentences(
        odd_sentence(), tokenizer=tokenizer, labels=labels, max_length=64, label_all_tokens=everywhere
    )
    # One word at a time, which needs no word mapping.
    wanted, first = [], []
    for number, (word, tag) in enumerate(zip(ODD, ODD_TAGS)):
        pieces = tokenizer.backend_tokenizer.encode([word], is_pretokenized=True, add_special_tokens=False).ids
        inner = tag.replace("B-LOC", "I-LOC").replace("B-PER", "B-PER")  # no label I-PER
        rest = [labels.index(inner)] if everywhere else [-100]
        wanted += [(piece, *label) for piece, label in zip(pieces, [[labels.index(tag)]] + [rest] * len(pieces))]
        first += [number] * bool(pieces)
    row = rows[0]
    body = [(piece, label) for piece, label in zip(row["input_ids"], row["labels"])]
    specials = len(tokenizer("a")["input_ids"]) - len(tokenizer("a", add_special_tokens=False)["input_ids"])
    start = 1 if specials == 2 else 0
    assert body[start : len(body) - (specials - start)] == wanted
    assert [number for number in row["words"] if number >= 0] == first
    assert set(range(len(ODD))) - set(first) == vanished
    assert row["labels"][-1 if specials else 0] == (-100 if specials else wanted[0][1])
    # One tag for each word, those without pieces outside.
    logits = np.eye(len(labels))[np.maximum(row["labels"], 0)] * 20
    (found,) = tags_of_words(odd_sentence(), rows, [logits], labels)
    assert found.tags == ODD_TAGS
    assert {place for place, score in enumerate(found.scores) if score == 0} == vanished
    assert f"{len(vanished)} of 6 words have no piece" in caplog.text


def test_a_tokenizer_that_knows_no_words_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(UsageError, match="Slow does not tell which word"):
        tokenize_sentences(odd_sentence(), tokenizer=Slow(), labels=["O"], max_length=8)
    with pytest.raises(UsageError, match="--max_seq_length is 2: this tokenizer needs 3"):
        tokenize_sentences(odd_sentence(), tokenizer=tokenizer_of("bert"), labels=ODD_TAGS, max_length=2)


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 8, 13])
def test_every_piece_is_owned_once_by_windows_that_fit(room):
    for length in range(60):
        owners = np.zeros(length, int)
        for part, owned in windows(length, room):
            assert part.stop - part.start <= room
            owners[part] += owned
        assert (owners == 1).all()
        inner = windows(length, room)[:-1]
        assert all(owned[1:].sum() and part.stop - part.start == room for part, owned in inner if room > 1)


@pytest.mark.parametrize("length", [8, 16, 64])
def test_long_sentences_keep_one_tag_a_word(length):
    rng = np.random.default_rng(0)
    words = [[str(word) for word in rng.choice(["statement", "expression", "x", "\n", "unübersehbar"], count)] for count in (0, 1, 9, 50)]  # fmt: skip
    labels = ["B-X", "I-X", "O"]
    tags = [[str(tag) for tag in rng.choice(labels, len(sentence))] for sentence in words]
    tags = [[tag if word != "\n" else "O" for word, tag in zip(*pair)] for pair in zip(words, tags)]
    sentences = datasets.Dataset.from_dict({"words": words, "tags": tags, "place": ["here"] * 4})
    rows = tokenize_sentences(sentences, tokenizer=tokenizer_of("bert"), labels=labels, max_length=length)
    assert max(map(len, rows["input_ids"])) <= length
    assert sum(rows["first"]) == 4 <= len(rows)
    scored = sum(label != -100 for row in rows["labels"] for label in row)
    assert scored == sum(word != "\n" for sentence in words for word in sentence)
    logits = [np.eye(3)[np.maximum(row, 0)] for row in rows["labels"]]
    assert [each.tags for each in tags_of_words(sentences, rows, logits, labels)] == tags


def test_a_batch_weighs_what_is_labelled_and_nothing_else():
    rows = tokenize_sentences(odd_sentence(), tokenizer=tokenizer_of("bert"), labels=sorted({*ODD_TAGS}), max_length=64)
    table = rows.with_format("arrow")[[0, 0]]
    batch = TagCollate(0)(table, indices=np.arange(2), weights=np.array([1, 0], np.float32), epoch=0, length=64)
    scored = np.array(rows[0]["labels"]) >= 0
    assert batch["label_weights"].sum() == scored.sum() == 4
    assert batch["label_weights"][1].sum() == 0
    assert batch["labels"].min() == 0
    assert batch["attention_mask"].sum() == 2 * len(scored)


# Spans.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_spans_are_those_of_seqeval(scheme):
    answers = json.loads((golden.GOLDEN / "tag_scores.json").read_text())[scheme]
    wanted, given = drawn(scheme)
    assert [[list(span) for span in spans_of(tags)] for tags in wanted + given] == answers["entities"]
    scores = span_scores(wanted, given)
    assert [scores[name] for name in ("precision", "recall", "f1", "accuracy")] == pytest.approx(answers["scores"])


def test_scores_by_type():
    wanted = [["B-PER", "I-PER", "O", "B-LOC"], ["O"]]
    given = [["B-PER", "O", "O", "B-LOC"], ["B-ORG"]]
    scores = span_scores(wanted, given, by_type=True)
    assert scores["precision"] == pytest.approx(1 / 3)
    assert scores["recall"] == scores["LOC_number"] / 2 == 0.5
    assert (scores["LOC_f1"], scores["PER_f1"], scores["ORG_recall"]) == (1, 0, 0)
    assert span_scores([["O"]], [["O"]]) == {"precision": 0, "recall": 0, "f1": 0, "accuracy": 1}
    assert span_scores([], [])["f1"] == 0
