"""Texts: the pipelines that write, stop strings, and `distaff generate`."""

import io
import json
import re

import pytest
from transformers import GPT2Config, MBartConfig, T5Config

from distaff import FlaxGPT2LMHeadModel, FlaxMBartForConditionalGeneration, FlaxT5ForConditionalGeneration, pipeline
from distaff.cli import main
from distaff.core.errors import DataError, UsageError
from distaff.tasks.generate import GenerateFlags, read_prompts
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer
from golden import generation_cases as golden
from pair_cases import one_line
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
    # The sign of a broken character is no text of any token.
    stop = next(piece for piece in (whole[place : place + 2] for place in range(3, 12)) if "\ufffd" not in piece)
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


def test_a_fresh_seed_is_reported(folders, capsys):
    words = ["generate", folders["gpt2"], "--max_new_tokens", "12", "--prompt", "Basel", "--do_sample", "True"]
    assert main(words) == 0
    said = capsys.readouterr()
    seed = re.search(r"fresh seed (\d+)", said.err).group(1)
    assert main([*words, "--seed", seed]) == 0
    again = capsys.readouterr()
    assert again.out == said.out
    assert "fresh" not in again.err


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Folders whose tokenizer makes nothing of an empty text: a model of as many tokens, of fewer, one of languages."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "eos_token_id": 3, "bos_token_id": 3}
    languages = {name: value for name, value in golden.BART.items() if name != "vocab_size"}
    models = {
        "model": FlaxGPT2LMHeadModel(GPT2Config(**sizes, vocab_size=64)),
        "fewer": FlaxGPT2LMHeadModel(GPT2Config(**sizes, vocab_size=8)),
        "pad": FlaxGPT2LMHeadModel(GPT2Config(**sizes, vocab_size=64, pad_token_id=70)),
        "languages": FlaxMBartForConditionalGeneration(MBartConfig(**languages, vocab_size=64)),
    }
    folder = tmp_path_factory.mktemp("small")
    for name, model in models.items():
        model.save_pretrained(folder / name)
        golden.tokenizer("gpt2").save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("model", ["--prompt", ""], "has no tokens"),
        ("model", ["--prompt", "c" * 16], "16 tokens and the model 16 positions, which leaves none"),
        ("model", ["--prompt", "c" * 40], "40 tokens and the model 16 positions"),
        ("model", ["--prompt", "cab", "--max_new_tokens", "99"], "generate at most"),
        ("model", ["--prompt", "c", "--num_beams", "2", "--num_return_sequences", "3"], "num_return_sequences is 3"),
        ("model", ["--prompt", "c", "--stop_strings", "aXb"], "spell none of"),
        ("model", ["--prompt", "c", "--tgt_lang", "de_DE"], "no option 'tgt_lang'"),
        ("fewer", ["--prompt", "cab"], "vocab_size is 8"),
        ("pad", ["--prompt", "cab"], "pad_token_id"),
        ("languages", ["--prompt", "cab"], "name the target with tgt_lang"),
        ("languages", ["--prompt", "cab", "--tgt_lang", "xx_XX"], "no language 'xx_XX'"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["streamed", "whole"])
def test_prompts_that_cannot_be_continued(small, capsys, name, words, message, more):
    assert main(["generate", str(small / name), *words, *more]) in (1, 2)
    assert message in one_line(capsys)


def test_a_file_without_prompts(small, tmp_path, capsys):
    (tmp_path / "none.txt").write_text("\n \n")
    assert main(["generate", str(small / "model"), "--prompt_file", str(tmp_path / "none.txt")]) == 2
    assert "There is no prompt" in one_line(capsys)


def test_stop_strings_with_beams(small, capsys):
    """Looked for on the command line too, and the same as the library's."""
    words = ["generate", str(small / "model"), "--prompt", "cab", "--num_beams", "3", "--max_new_tokens", "10"]
    assert main(words) == 0
    whole = capsys.readouterr().out
    stop = whole.strip()[5:7]
    assert main([*words, "--stop_strings", stop]) == 0
    cut = capsys.readouterr().out.strip()
    assert stop in cut[3:]
    assert len(cut) < len(whole.strip())


def test_the_target_language_comes_first(small):
    """Case T41: as the decoder's start where nothing else is, and else as the first token."""
    write = pipeline("translation", str(small / "languages"), max_new_tokens=3)
    token = write.tokenizer.convert_tokens_to_ids("cc")
    write("cab", tgt_lang="cc")
    assert write._options({"tgt_lang": "cc"}) == {"decoder_start_token_id": token}
    write.model.generation_config = {"decoder_start_token_id": 2}
    assert write._options({"tgt_lang": "cc"}) == {"forced_bos_token_id": token}


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
