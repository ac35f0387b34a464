"""Texts: the pipelines that write, stop strings, and `distaff generate`."""

import io
import json

import pytest
from transformers import GPT2Config, T5Config

from distaff import FlaxGPT2LMHeadModel, FlaxT5ForConditionalGeneration, pipeline
from distaff.cli import main
from distaff.core.errors import DataError, UsageError
from distaff.tasks.generate import GenerateFlags, read_prompts
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer
from text_cases import tokenizer_of

TEXT = "Zürich isch e schöni Stadt.\nBasel isch au e Stadt.\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random GPT-2 and a random T5 with one tokenizer."""
    folder = tmp_path_factory.mktemp("write")
    (folder / "text.txt").write_text(TEXT * 20)
    paths = {name: folder / name for name in ("gpt2", "t5")}
    for path in paths.values():
        train_tokenizer(TokenizerFlags(train_file=str(folder / "text.txt"), vocab_size=300, output_dir=str(path)))
    small = {"vocab_size": 300, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    gpt2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=96, initializer_range=0.5, **small)
    FlaxGPT2LMHeadModel(gpt2).save_pretrained(paths["gpt2"])
    sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
    tasks = {"summarization": {"prefix": "kurz: "}}
    t5 = T5Config(**sizes, **small, decoder_start_token_id=1, task_specific_params=tasks)
    FlaxT5ForConditionalGeneration(t5).save_pretrained(paths["t5"])
    return {name: str(path) for name, path in paths.items()}


def test_text_generation(folders):
    write = pipeline("text-generation", folders["gpt2"], max_new_tokens=6)
    (one,) = write("Basel isch")
    assert one["generated_text"].startswith("Basel isch")
    several = write(["Basel", "Zürich isch e schöni"])
    assert several[1][0]["generated_text"].startswith("Zürich isch e schöni")
    assert several[0] == write("Basel")
    (rest,) = write("Basel isch", return_full_text=False)
    assert one["generated_text"] == "Basel isch" + rest["generated_text"]
    drawn = write("Basel", do_sample=True, num_return_sequences=3)
    assert len(drawn) == 3
    pieces = []
    assert write.stream("Basel isch", pieces.append) == "".join(pieces) == rest["generated_text"]


def test_stop_strings_end_a_text(folders):
    write = pipeline("text-generation", folders["gpt2"], max_new_tokens=30, eos_token_id=299)
    whole = write("Basel", return_full_text=False)[0]["generated_text"]
    stop = whole[4:6]
    cut = write("Basel", return_full_text=False, stop_strings=[stop])[0]["generated_text"]
    assert whole.startswith(cut)
    assert stop in cut
    assert len(cut) < len(whole)


def test_answers_of_an_encoder_decoder(folders):
    summarize = pipeline("summarization", folders["t5"], max_new_tokens=5)
    same = pipeline("text2text-generation", folders["t5"], max_new_tokens=5)
    (summary,) = summarize("Basel isch au e Stadt.")
    assert list(summary) == ["summary_text"]
    assert summary["summary_text"] == same("kurz: Basel isch au e Stadt.")[0]["generated_text"]
    translate = pipeline("translation", folders["t5"], max_new_tokens=5)
    assert list(translate("Basel")[0]) == ["translation_text"]
    with pytest.raises(UsageError, match="xx_XX"):
        translate("Basel", tgt_lang="xx_XX")


def test_texts_that_do_not_fit(folders):
    write = pipeline("text-generation", folders["gpt2"], max_new_tokens=2)
    with pytest.raises(UsageError, match="96 positions"):
        write("Basel isch " * 100)
    assert write("Basel isch " * 100, truncation=True, max_new_tokens=1)
    with pytest.raises(UsageError, match="tokenizer"):
        pipeline("text-generation", write.model)
    # A tokenizer without special tokens makes nothing of an empty text.
    write.tokenizer = lambda text: {"input_ids": []}
    with pytest.raises(DataError, match="no tokens"):
        write("")


def test_the_command(folders, tmp_path, capsys, monkeypatch):
    plain = ["generate", folders["gpt2"], "--max_new_tokens", "5"]
    assert main([*plain, "--prompt", "Basel isch"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Basel isch")
    expected = pipeline("text-generation", folders["gpt2"])("Basel isch", max_new_tokens=5)[0]["generated_text"]
    assert shown == expected + "\n"
    (tmp_path / "prompts.txt").write_text("Basel isch\n\nZürich\n")
    assert main([*plain, "--prompt_file", str(tmp_path / "prompts.txt"), "--json", "--batch_size", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["Basel isch", "Zürich"]
    assert lines[0]["texts"] == [expected]
    monkeypatch.setattr("sys.stdin", io.StringIO("Basel isch\n"))
    assert main(plain) == 0
    assert capsys.readouterr().out == shown
    seeded = [*plain, "--prompt", "Basel", "--do_sample", "--seed", "3"]
    assert main(seeded) == 0
    first = capsys.readouterr().out
    assert main(seeded) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", folders["t5"], "--max_new_tokens", "5", "--num_beams", "2", "--prompt", "Basel"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--prompt_file", "b"], "--prompt_file"),
        (["--prompt_file", "no_such_file"], "no_such_file"),
        (["--prompt", "a", "--early_stopping", "soon"], "early_stopping"),
        (["--prompt", "a", "--temperature", "0.5"], "do_sample"),
        (["--prompt", "a", "--batch_size", "0"], "batch_size"),
    ],
)
def test_wrong_flags_are_refused(folders, capsys, words, message):
    assert main(["generate", folders["gpt2"], *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("content", [b"Basel\nZ\xfcrich\n", b"\xff"])
def test_bytes_that_are_not_utf_8_are_one_sentence(folders, tmp_path, capsys, monkeypatch, content):
    (tmp_path / "prompts.txt").write_bytes(content)
    word = content.decode("utf-8", "surrogateescape")
    for words in (["--prompt_file", str(tmp_path / "prompts.txt")], [], ["--prompt", word]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        assert main(["generate", folders["gpt2"], *words, "--batch_size", "2", "--max_new_tokens", "1"]) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("distaff: ")
        assert error.endswith("'iconv -t utf-8'.")


def test_prompts_of_windows(folders, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("\ufeffBasel\u2028isch\r\n\r\nZürich\r\n".encode())
    flags = GenerateFlags(model_name_or_path="x", prompt_file=str(tmp_path / "prompts.txt"))
    assert list(read_prompts(flags)) == ["Basel\u2028isch", "Zürich"]


def test_a_prompt_is_not_ended(folders):
    """RoBERTa's tokenizer puts the end behind a text; an end that is written in the text stays."""
    write = pipeline("text-generation", folders["gpt2"])
    write.tokenizer = tokenizer = tokenizer_of("roberta")
    inside = tokenizer("Basel", add_special_tokens=False)["input_ids"]
    assert write.ids_of("Basel") == [tokenizer.bos_token_id, *inside]
    assert write.ids_of("Basel</s>") == [
        tokenizer.bos_token_id,
        *inside,
        tokenizer.eos_token_id,
        tokenizer.eos_token_id,
    ]
    assert write.ids_of("") == [tokenizer.bos_token_id]
