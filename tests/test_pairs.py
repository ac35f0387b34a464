"""Pairs of texts out of files and datasets, their ids, and their batches."""

import json
import logging

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import MBart50Tokenizer, MBartTokenizer

from distaff.core.errors import DataError, UsageError
from distaff.data.batches import Batches
from distaff.data.pairs import PairCollate, load_pairs, tokenize_pairs
from distaff.tasks.summarization import SummarizationFlags, summary_columns
from distaff.tasks.translation import TranslationFlags, language_columns
from text_cases import tokenizer_of

ROWS = [("A long text, with a comma.", "Short."), ("Zürich\nisch schöö 😀", "Züri"), ("three", "3")]
SUMMARY = summary_columns(SummarizationFlags())
EN_DE = language_columns(TranslationFlags(source_lang="en", target_lang="de"))


@pytest.fixture
def load(tmp_path):
    """Load pairs from files written from {name: content}."""

    def load(content, columns=SUMMARY, **options):
        for name, text in content.items():
            (tmp_path / name).write_text(text)
        return load_pairs(
            columns, files=[str(tmp_path / name) for name in content], cache_dir=tmp_path / "c", **options
        )

    return load


def pairs_of(dataset):
    return [(row["source"], row["target"]) for row in dataset]


def lines(records):
    return "\n".join(json.dumps(record) for record in records)


# Files.


def test_formats_say_the_same(load, tmp_path):
    records = [{"id": str(i), "document": text, "summary": summary} for i, (text, summary) in enumerate(ROWS)]
    quoted = "\n".join(f'{r["id"]},"{r["document"]}","{r["summary"]}"' for r in records)
    for name, content in {
        "a.jsonl": lines(records),
        "lines.json": lines(records),
        "list.json": json.dumps(records, indent=1),
        "data.json": json.dumps({"data": records}),
        "a.csv": f"id,document,summary\n{quoted}\n",
    }.items():
        assert pairs_of(load({name: content})) == ROWS, name
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    assert pairs_of(load_pairs(SUMMARY, files=str(tmp_path / "a.parquet"), cache_dir=tmp_path / "c")) == ROWS


def test_translations_stand_in_columns_or_in_one_object(load, tmp_path):
    nested = [{"id": 1, "translation": {"en": a, "de": b, "fr": "x"}} for a, b in ROWS]
    assert pairs_of(load({"a.jsonl": lines(nested)}, EN_DE)) == ROWS
    assert pairs_of(load({"b.jsonl": lines([{"de": b, "en": a} for a, b in ROWS])}, EN_DE)) == ROWS
    pq.write_table(pa.Table.from_pylist(nested), tmp_path / "a.parquet")
    assert pairs_of(load_pairs(EN_DE, files=str(tmp_path / "a.parquet"), cache_dir=tmp_path / "c")) == ROWS
    codes = language_columns(TranslationFlags(source_lang="en_XX", target_lang="de_DE"))
    assert pairs_of(load({"a.jsonl": lines(nested)}, codes)) == ROWS


def test_columns_by_name_by_habit_and_by_order(load):
    records = [{"id": "1", "dialogue": a, "summary": b, "other": "o"} for a, b in ROWS]
    assert pairs_of(load({"a.jsonl": lines(records)})) == ROWS
    named = summary_columns(SummarizationFlags(text_column="other", summary_column="id"))
    assert pairs_of(load({"a.jsonl": lines(records)}, named)) == [("o", "1")] * 3
    assert pairs_of(load({"b.csv": "first,second\nx,y\n"})) == [("x", "y")]


def test_datasets_give_pairs(tmp_path, caplog):
    records = [{"id": 1, "article": a, "highlights": b} for a, b in ROWS]
    datasets.DatasetDict({"validation": datasets.Dataset.from_list(records)}).save_to_disk(tmp_path / "sum")
    assert pairs_of(load_pairs(SUMMARY, dataset_name=str(tmp_path / "sum"), split="validation")) == ROWS
    with pytest.raises(UsageError, match="has no split 'train'"):
        load_pairs(SUMMARY, dataset_name=str(tmp_path / "sum"))
    features = datasets.Features({"translation": datasets.Translation(["en", "de"])})
    nested = [{"translation": {"en": a, "de": b}} for a, b in [*ROWS, ("", ""), ("only", None)]]
    datasets.Dataset.from_list(nested, features=features).save_to_disk(tmp_path / "tr")
    with pytest.raises(DataError, match="row 5: the target is blank"):
        load_pairs(EN_DE, dataset_name=str(tmp_path / "tr"))
    with caplog.at_level(logging.INFO, "distaff"):
        skipping = language_columns(TranslationFlags(source_lang="en", target_lang="de", skip_blank_pairs=True))
        assert pairs_of(load_pairs(skipping, dataset_name=str(tmp_path / "tr"))) == ROWS
    assert "3 pairs, 2 blank rows left out" in caplog.text


# What is blank.


def test_blank_rows_are_refused_skipped_or_kept(load, caplog):
    """Case T85: the policy for empty targets."""
    content = {"a.jsonl": lines([{"document": "a", "summary": "b"}, {}, {"document": "c", "summary": "  "}])}
    content["a.jsonl"] = content["a.jsonl"].replace("{}", "")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: the target is blank: correct the row, or leave"):
        load(content)
    with caplog.at_level(logging.INFO, "distaff"):
        assert pairs_of(load(content, summary_columns(SummarizationFlags(skip_blank_pairs=True)))) == [("a", "b")]
        assert "1 pairs, 2 blank rows left out" in caplog.text
        caplog.clear()
        # From the cache, and still said.
        load(content, summary_columns(SummarizationFlags(skip_blank_pairs=True)))
        assert "1 pairs, 2 blank rows left out" in caplog.text
    kept = summary_columns(SummarizationFlags(), predict=True)
    assert pairs_of(load(content, kept)) == [("a", "b"), ("c", "  ")]
    with pytest.raises(DataError, match="line 1: the source is blank"):
        load({"b.jsonl": lines([{"document": None, "summary": "b"}])})


def test_targets_may_be_absent_where_only_predictions_are_wanted(load):
    content = {"a.jsonl": lines([{"document": "a"}, {"document": ""}])}
    kept = summary_columns(SummarizationFlags(), predict=True)
    assert pairs_of(load(content, kept)) == [("a", None), ("", None)]
    rows = tokenize_pairs(
        load(content, kept), tokenizer=tokenizer_of("roberta"), max_source_length=9, max_target_length=9
    )
    assert rows.column_names == ["input_ids"]
    german = language_columns(TranslationFlags(source_lang="en", target_lang="de"), predict=True)
    assert pairs_of(load({"b.jsonl": lines([{"translation": {"en": "a"}}])}, german)) == [("a", None)]


@pytest.mark.parametrize(
    ("name", "content", "columns", "words"),
    [
        ("a.jsonl", '{"document": "a", "summary": "b"}\n{"document": "a"}', SUMMARY, "line 2: no column 'summary'"),
        ("a.jsonl", '{"document": "a", "summary": "b"}\n{"document": ', SUMMARY, "line 2: not valid JSON"),
        ("a.jsonl", '{"document": "a", "other": 3}', SUMMARY, "no column of text for --summary_column"),
        (
            "a.jsonl",
            '{"document": "a", "summary": "b"}\n{"document": "a", "summary": 3}',
            SUMMARY,
            "line 2: the target is",
        ),
        ("a.jsonl", '["a", "b"]', SUMMARY, "line 1: a list where an object"),
        ("a.csv", "document,summary\na,b\na,b,c\n", SUMMARY, "line 3: 3 fields where the header has 2"),
        ("a.txt", "a\tb\n", SUMMARY, "no column of text for --summary_column: it has text"),
        ("a.jsonl", '{"en": "a", "fr": "b"}', EN_DE, "no column 'de', which --target_lang names: it has en, fr"),
        ("a.jsonl", '{"translation": {"en": "a"}}', EN_DE, "line 1: 'translation' must hold en, de, and it holds en"),
        ("a.jsonl", '{"translation": {"en": "a", "de": "b"}}\n{"translation": 1}', EN_DE, "line 2: 'translation' must"),
        ("a.jsonl", "\n\n", SUMMARY, "has no pair of texts: 2 blank rows"),
        ("a.jsonl", '{"document": "a\\ud800", "summary": "b"}', SUMMARY, "half of a surrogate pair"),
    ],
)
def test_bad_files_are_one_sentence(load, name, content, columns, words):
    with pytest.raises(DataError, match=words) as caught:
        load({name: content}, columns)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


# Ids and batches.


def test_cut_texts_keep_their_special_tokens_and_are_counted(load, caplog):
    """Case T85: a source of 10,000 words."""
    tokenizer = tokenizer_of("roberta")
    rows = [{"document": "word " * 10_000, "summary": "word " * 40}, {"document": "a", "summary": "b"}]
    with caplog.at_level(logging.INFO, "distaff"):
        found = tokenize_pairs(
            load({"a.jsonl": lines(rows)}),
            tokenizer=tokenizer,
            max_source_length=16,
            max_target_length=8,
            prefix="summarize: ",
        )
    assert "1 sources were longer than 16 tokens and 1 targets longer than 8: they are cut" in caplog.text
    options = {"truncation": True, "max_length": 16}
    assert found["input_ids"][:] == [tokenizer("summarize: " + row["document"], **options)["input_ids"] for row in rows]
    assert found["labels"][0] == tokenizer(rows[0]["summary"], truncation=True, max_length=8)["input_ids"]
    assert found["labels"][0][-1] == tokenizer.eos_token_id
    for name in ("max_source_length", "max_target_length"):
        with pytest.raises(UsageError, match=f"--{name} is 2: this tokenizer needs 3 or more"):
            tokenize_pairs(
                load({"a.jsonl": lines(rows)}),
                tokenizer=tokenizer,
                **{"max_source_length": 9, "max_target_length": 9, name: 2},
            )


def test_pairs_are_tokenised_once(load, monkeypatch):
    import distaff.data.pairs as module

    calls, inner = [], module._encode_pairs
    monkeypatch.setattr(module, "_encode_pairs", lambda *texts, **options: calls.append(1) or inner(*texts, **options))
    dataset = load({"a.jsonl": lines([{"document": "a text", "summary": "text"}] * 3)})
    lengths = {"max_source_length": 9, "max_target_length": 9}
    found = [
        tokenize_pairs(dataset, tokenizer=tokenizer_of("roberta"), **lengths, **options)["input_ids"][:]
        for options in ({}, {}, {"overwrite_cache": True}, {"prefix": "x "})
    ]
    assert found[0] == found[1] == found[2] != found[3]
    assert len(calls) == 3


@pytest.mark.parametrize("kind", [MBartTokenizer, MBart50Tokenizer])
def test_targets_have_the_tokens_of_their_language(load, kind):
    tokenizer = kind(src_lang="en_XX", tgt_lang="de_DE")
    rows = load({"a.jsonl": lines([{"en": "a", "de": "b"}])}, EN_DE)
    found = tokenize_pairs(rows, tokenizer=tokenizer, max_source_length=9, max_target_length=9)
    wanted = tokenizer("a", text_target="b")
    assert found["input_ids"][0] == wanted["input_ids"]
    assert found["labels"][0] == wanted["labels"]
    assert tokenizer.convert_tokens_to_ids("de_DE") in found["labels"][0]
    assert tokenizer("a")["input_ids"] == wanted["input_ids"]


def test_padding_is_told_by_place_and_not_by_id():
    """Case T51: the pad token's id may stand in a text."""
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 0, 7, 0], [4]], "labels": [[0, 3, 0], [2]]})
    batch = Batches(rows, collate=PairCollate(0, 4), batch_size=4, shuffle=False, max_length=8)(0)
    assert batch["attention_mask"].sum(axis=1).tolist() == [4, 1, 4, 4]
    assert batch["label_weights"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert batch["input_ids"][0].tolist() == [5, 0, 7, 0, 0, 0, 0, 0]
    assert batch["labels"][:2].tolist() == [[0, 3, 0, 0], [2, 0, 0, 0]]
    assert {name: array.dtype for name, array in batch.items()} == {
        "input_ids": np.int32,
        "attention_mask": np.int32,
        "labels": np.int32,
        "label_weights": np.float32,
    }
