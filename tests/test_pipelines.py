"""Fill-mask as a call, and on the command line."""

import io
import json

import numpy as np
import pytest
from transformers import BertConfig

from distaff import FlaxBertForMaskedLM, pipeline
from distaff.cli import main
from distaff.core.errors import CheckpointError, DataError, UsageError
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer


def assert_same(found, wanted):
    """Equal but for the rounding of scores."""
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, two in zip(found, wanted):
            assert_same(one, two)
    else:
        assert found == wanted | {"score": pytest.approx(wanted["score"], abs=1e-6)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random BERT and its tokenizer in one folder; the vocabulary is padded to 128."""
    folder = tmp_path_factory.mktemp("fill-mask")
    text = folder / "text.txt"
    text.write_text("Zürich isch e schöni Stadt.\nBasel isch au e Stadt.\n" * 20)
    train_tokenizer(
        TokenizerFlags(train_file=str(text), algorithm="wordpiece", vocab_size=90, output_dir=str(folder / "model"))
    )
    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
        initializer_range=0.5,
    )
    FlaxBertForMaskedLM(config).save_pretrained(folder / "model")
    return folder / "model"


def test_fillings_are_the_likeliest_tokens(folder):
    fill = pipeline("fill-mask", str(folder), top_k=4)
    text = "Zürich isch e [MASK]."
    fillings = fill(text)
    ids = np.asarray(fill.tokenizer(text)["input_ids"], np.int32)[None]
    place = int(np.flatnonzero(ids[0] == fill.tokenizer.mask_token_id)[0])
    logits = np.asarray(fill.model(ids).logits[0, place, : len(fill.tokenizer)], np.float64)
    wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert [filling["token"] for filling in fillings] == np.argsort(-wanted)[:4].tolist()
    for filling in fillings:
        assert filling["score"] == pytest.approx(wanted[filling["token"]], abs=1e-5)
        assert filling["token_str"].strip("# ") in filling["sequence"]
    assert "[CLS]" not in fillings[0]["sequence"]


def test_several_texts_and_several_masks(folder):
    fill = pipeline("fill-mask", str(folder), top_k=2)
    one, two = fill(["[MASK] isch e Stadt.", "[MASK] isch [MASK]."])
    assert [filling["score"] for filling in one] == sorted((filling["score"] for filling in one), reverse=True)
    assert [len(mask) for mask in two] == [2, 2]
    assert_same(one, fill("[MASK] isch e Stadt."))


def test_texts_of_other_lengths_and_masks_are_filled_as_alone(folder):
    texts = ["[MASK] isch e Stadt.", "[MASK] [MASK] e [MASK].", "Basel [MASK].", "Zürich isch [MASK] schöni [MASK]."]
    alone = [pipeline("fill-mask", str(folder), batch_size=1, top_k=3)(text) for text in texts]
    assert [len(each) for each in alone] == [3, 3, 3, 2]
    for size in (3, 8):
        assert_same(pipeline("fill-mask", str(folder), batch_size=size, top_k=3)(texts), alone)
    only = pipeline("fill-mask", str(folder), targets=["isch", "Stadt"])
    assert {filling["token_str"] for filling in only(texts[0])} == {"isch", "Stadt"}


def test_targets_compete_alone(folder):
    fill = pipeline("fill-mask", str(folder))
    everything = {filling["token"]: filling["score"] for filling in fill("Zürich [MASK] schön.", top_k=200)}
    found = fill("Zürich [MASK] schön.", targets=["isch", "Stadt"])
    assert {filling["token_str"] for filling in found} == {"isch", "Stadt"}
    for filling in found:
        assert filling["score"] == pytest.approx(everything[filling["token"]], abs=1e-6)
    with pytest.raises(DataError, match="no single token"):
        fill("Zürich [MASK].", targets=["Donaudampfschiff"])


def test_what_cannot_be_filled_is_refused(folder, tmp_path):
    fill = pipeline("fill-mask", str(folder))
    with pytest.raises(DataError, match=r"No '\[MASK\]'"):
        fill("nothing to fill")
    with pytest.raises(DataError, match="longer than the 20"):
        fill("isch " * 30 + "[MASK]")
    with pytest.raises(UsageError, match="no pipeline 'fill-musk'"):
        pipeline("fill-musk", str(folder))
    with pytest.raises(UsageError, match="needs its tokenizer"):
        pipeline("fill-mask", fill.model)
    fill.model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        pipeline("fill-mask", str(tmp_path))


def test_settings_that_mean_nothing_are_refused(folder):
    for settings, words in (({"topk": 3}, "did you mean 'top_k'"), ({"device": 0}, "no setting 'device'")):
        with pytest.raises(UsageError, match=words):
            pipeline("fill-mask", str(folder), **settings)
    with pytest.raises(UsageError, match="top_k is 0"):
        pipeline("fill-mask", str(folder), top_k=0)
    fill = pipeline("fill-mask", str(folder), tokenizer=str(folder))
    with pytest.raises(UsageError, match="top_k is -1"):
        fill("Zürich [MASK].", top_k=-1)
    with pytest.raises(UsageError, match="targets is empty"):
        fill("Zürich [MASK].", targets=[])
    assert [filling["token_str"] for filling in fill("Zürich [MASK].", targets="isch")] == ["isch"]


@pytest.mark.parametrize("content", [b"Z\xfcrich isch [MASK].\n", b"\xff"])
def test_bytes_that_are_not_utf_8_are_one_sentence(folder, capsys, monkeypatch, content):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    assert main(["predict", "fill-mask", str(folder)]) == 1
    assert "Standard input is not utf-8" in capsys.readouterr().err
    assert main(["predict", "fill-mask", str(folder), content.decode("utf-8", "surrogateescape")]) == 1
    assert "is not UTF-8" in capsys.readouterr().err


def test_predict_on_the_command_line(folder, capsys, monkeypatch):
    assert main(["predict", "fill-mask", str(folder), "Zürich isch [MASK].", "--top_k", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Zürich isch [MASK]."
    assert len(lines[1].split("  ")) == 4
    monkeypatch.setattr("sys.stdin", io.StringIO("[MASK] isch.\n\nBasel [MASK].\n"))
    assert main(["predict", "fill-mask", "--model_name_or_path", str(folder), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["[MASK] isch.", "Basel [MASK]."]
    assert main(["predict", "fill-mask", str(folder), "no mask"]) == 1
    assert "distaff: No '[MASK]'" in capsys.readouterr().err
