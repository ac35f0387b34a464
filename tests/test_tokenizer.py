"""Training a tokenizer: layouts, round trips, files that AutoTokenizer opens, and what is refused."""

import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, HfArgumentParser

from distaff.cli import main
from distaff.core.errors import DataError, DistaffError, UsageError
from distaff.data.masking import special_ids
from distaff.tasks.tokenizer import RECIPES, TokenizerFlags, run
from text_cases import reference_lines

HARD = [
    "Zürich  isch\te Stadt.",
    " leading",
    "trailing ",
    "😀 👩‍👩‍👧",
    "שלום עולם",
    "nul \x00, line\u2028separator",
    "é é",
    "\ufeffmark",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "reference.txt"
    path.write_text("\n".join(reference_lines()[:2000]))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def trained(corpus, folder, **options):
    return AutoTokenizer.from_pretrained(run(TokenizerFlags(output_dir=str(folder), train_file=str(corpus), **options)))


def test_byte_level_bpe_is_roberta_s(corpus, tmp_path):
    tokenizer = trained(
        corpus, tmp_path / "out", vocab_size=1000, special_tokens="<name>, <place>", model_max_length=128
    )
    assert len(tokenizer) == 1000
    assert tokenizer.convert_ids_to_tokens(range(7)) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<name>", "<place>"]
    ids = (
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
        tokenizer.mask_token_id,
    )
    assert ids == (0, 1, 2, 3, 4)
    assert (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.model_max_length) == (0, 2, 128)
    assert special_ids(tokenizer) == tuple(range(7))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a", "b")["input_ids"]) == [
        "<s>",
        "a",
        "</s>",
        "</s>",
        "b",
        "</s>",
    ]
    for text in [*HARD, *reference_lines()[2000:2200]]:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    # The mask stands for a word with its space, as the words of the training rows do.
    assert tokenizer.convert_ids_to_tokens(tokenizer("is <mask>.")["input_ids"])[-3:] == ["<mask>", ".", "</s>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a <name>")["input_ids"])[-2] == "<name>"
    padded = tokenizer(["a", "a b c d e"], padding=True)
    assert padded["input_ids"][0][-1] == 1
    assert padded["attention_mask"][0][-1] == 0


def test_wordpiece_is_bert_s(corpus, tmp_path):
    tokenizer = trained(corpus, tmp_path / "out", vocab_size=800, algorithm="wordpiece", lowercase=True)
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    encoded = tokenizer("The Statement", "an Object")
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    second = tokens.index("[SEP]") + 1
    assert (tokens[0], tokens[-1], tokens.count("[SEP]")) == ("[CLS]", "[SEP]", 2)
    assert encoded["token_type_ids"] == [0] * second + [1] * (len(tokens) - second)
    assert tokenizer("STATEMENT")["input_ids"] == tokenizer("statement")["input_ids"]
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == "the statement an object"
    assert "token_type_ids" in tokenizer.model_input_names


def test_unigram_is_xlm_roberta_s(corpus, tmp_path):
    tokenizer = trained(corpus, tmp_path / "out", vocab_size=800, algorithm="unigram")
    assert len(tokenizer) == 800
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("The  statement", "an object")["input_ids"])
    assert (tokens[0], tokens[-1]) == ("<s>", "</s>")
    assert tokens.count("</s>") == 3
    assert tokenizer.decode(tokenizer("The  statement is")["input_ids"], skip_special_tokens=True) == "The statement is"
    assert tokenizer("日本")["input_ids"].count(tokenizer.unk_token_id) == 1


@pytest.mark.parametrize("algorithm", RECIPES)
def test_beside_a_model_config(corpus, tmp_path, algorithm):
    """`AutoTokenizer` gives the same ids with and without a config.json, and older versions know the class."""
    tokenizer = trained(corpus, tmp_path / "out", vocab_size=700, algorithm=algorithm, special_tokens="<x>")
    model_type = "bert" if algorithm == "wordpiece" else "roberta"
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 700}))
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [*reference_lines()[:50], "with <x> and " + tokenizer.mask_token]
    assert again(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    assert again.mask_token_id == tokenizer.mask_token_id == 4
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<x>"]


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_corpus_smaller_than_the_vocabulary(tmp_path, caplog, algorithm):
    (tmp_path / "small.txt").write_text("one line of text\nand another line of text\n")
    with caplog.at_level(logging.WARNING, "distaff"):
        tokenizer = trained(tmp_path / "small.txt", tmp_path / "out", algorithm=algorithm)
    assert f"The tokenizer has {len(tokenizer)} tokens, not 50265" in caplog.text
    assert tokenizer("one line")["input_ids"]


def test_flags_from_a_command_line():
    parser = HfArgumentParser(TokenizerFlags)
    (flags,) = parser.parse_args_into_dataclasses(
        ["--output_dir", "d", "--train_file", "a.txt", "--algorithm", "unigram", "--lowercase"]
    )
    assert flags == TokenizerFlags(output_dir="d", train_file="a.txt", algorithm="unigram", lowercase=True)
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", "d", "--algorithm", "morse"])


def test_what_the_trainer_cannot_do_is_one_sentence(corpus, tmp_path, capsys):
    words = ["tokenizer", "train", "--train_file", str(corpus), "--algorithm", "unigram", "--vocab_size", "7"]
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "unigram trainer cannot make 7 tokens" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(("name", "words"), [("", "--output_dir is empty"), ("file", "is a file")])
def test_folders_that_cannot_be_written_to(corpus, tmp_path, capsys, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    for command in (["tokenizer", "train", "--train_file", str(corpus)], ["config", "create", "--model_type", "bert"]):
        assert main([*command, "--output_dir", name]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_refused(corpus, tmp_path):
    def refuse(words, error=UsageError, **options):
        settings = {"output_dir": str(tmp_path / "out"), "train_file": str(corpus), **options}
        with pytest.raises(error, match=words):
            run(TokenizerFlags(**settings))

    refuse("must be one of byte-level-bpe", algorithm="morse")
    refuse("--vocab_size is 0", vocab_size=0)
    refuse("--vocab_size 100 is too small: .* are 261", vocab_size=100)
    refuse("one of --train_file and --dataset_name", train_file=None)
    refuse("no file", DataError, train_file=str(tmp_path / "none.txt"))
    refuse("is a file: name a folder", output_dir=str(corpus))
    refuse("cannot be written", DistaffError, output_dir=str(corpus / "in a file"))
    run(TokenizerFlags(output_dir=str(tmp_path / "out"), train_file=str(corpus), vocab_size=300))
    refuse("holds a tokenizer already")
    run(
        TokenizerFlags(
            output_dir=str(tmp_path / "out"), train_file=str(corpus), vocab_size=310, overwrite_output_dir=True
        )
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 310
