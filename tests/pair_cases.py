"""Pairs that can be learnt in seconds, their tokenizer, and runs of the recipes on them."""

import json
import re

import numpy as np

from distaff.cli import main
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer

ENGLISH = "the cat sat on a mat while two dogs ran over green hills and saw red birds fly home".split()
GERMAN = "die Katze saß auf der Matte während zwei Hunde über grüne Hügel rannten und Vögel sahen heim".split()

T5 = "d_model=32,d_kv=8,num_heads=4,d_ff=64,num_layers=1,num_decoder_layers=1"
BART = (
    "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,decoder_attention_heads=4,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,max_position_embeddings=40"
)


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences of four to eight words, and what stands for each word, in reverse."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, len(GERMAN), rng.integers(4, 9)) for _ in range(count)]
    return [
        (" ".join(ENGLISH[word] for word in row), " ".join(GERMAN[word] for word in reversed(row))) for row in drawn
    ]


def write_rows(path, rows) -> None:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")


def make_corpus(folder, row):
    """Write training, validation and test files, and one of 16 pairs to learn by heart, whose rows are `row(source, target)`, and a tokenizer."""
    for name, count, seed in (("train", 40, 0), ("few", 16, 0), ("validation", 13, 1), ("test", 11, 2)):
        write_rows(folder / f"{name}.jsonl", [row(*pair) for pair in pairs(count, seed)])
    (folder / "texts.txt").write_text("\n".join(text for pair in pairs(200, 0) for text in pair))
    flags = {"train_file": str(folder / "texts.txt"), "output_dir": str(folder / "tokenizer")}
    train_tokenizer(TokenizerFlags(vocab_size=400, **flags))
    return folder


def run(command, task, corpus, *flags):
    """Run `distaff train` or `eval` with the corpus's validation file and return the exit code."""
    validation = ("--validation_file", corpus / "validation.jsonl")
    rows = ("--per_device_eval_batch_size", 1)
    training = ("--per_device_train_batch_size", 8, "--report_to", "none") if command == "train" else ()
    return main([command, task, *map(str, (*validation, *rows, *training, *flags))])


def results(folder, name="all"):
    return json.loads((folder / f"{name}_results.json").read_text())


def one_line(capsys) -> str:
    """The error that was printed, which is one line without a traceback."""
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("distaff: ")]
    assert len(lines) == 1, error
    assert re.search(r"[.?]$", lines[0]), lines[0]
    return lines[0]
