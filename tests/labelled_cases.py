"""Texts with labels that can be learnt in seconds, a tokenizer, and runs of the recipe on them."""

import csv
import json

import numpy as np

from distaff.cli import main
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer
from recipe_cases import WORDS, settle_vocabulary

SHAPE = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,max_position_embeddings=64"
KINDS = ("bad", "good", "mixed")


def rows(count, seed=0, kinds=KINDS):
    """Sentences in which one word says the class."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        kind = int(rng.integers(len(kinds)))
        words = list(rng.choice(WORDS, rng.integers(2, 9)))
        words.insert(int(rng.integers(len(words) + 1)), kinds[kind])
        found.append({"sentence": " ".join(words), "label": kinds[kind]})
    return found


def write(path, records):
    """Write records as the file's name says: .csv, .tsv, .jsonl."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        return path
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(records)
    return path


def make_tokenizer(folder):
    """A WordPiece tokenizer of whole words."""
    (folder / "texts.txt").write_text("\n".join([" ".join([*WORDS, *KINDS])] * 20))
    flags = {"train_file": str(folder / "texts.txt"), "output_dir": str(folder / "tokenizer")}
    train_tokenizer(TokenizerFlags(algorithm="wordpiece", vocab_size=200, **flags))
    settle_vocabulary(folder / "tokenizer", [*WORDS, *KINDS])
    return folder / "tokenizer"


def run(command, *flags):
    """Run `distaff train glue` or `eval glue`, by the row and the device, and return the exit code."""
    training = ("--per_device_train_batch_size", 8, "--report_to", "none") if command == "train" else ()
    return main([command, "glue", "--per_device_eval_batch_size", "1", *map(str, (*training, *flags))])


def predicted(folder, name="predict_results.csv"):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def results(folder, name="eval"):
    return json.loads((folder / f"{name}_results.json").read_text())
