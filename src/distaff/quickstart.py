"""`distaff quickstart`, and `make run`: from raw text to a published folder in a few minutes, with nothing to download.

The text is Python's reference documentation, which every Python carries as `pydoc_data.topics`. The steps are those of
the command line: train a tokenizer, train a RoBERTa by masked language modeling, open the folder, fill masks.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distaff.core.errors import DistaffError, UsageError, listed
from distaff.tasks._flags import flag
from distaff.tasks._folder import output_folder
from distaff.tasks.mlm import MlmFlags, train
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer
from distaff.train.checkpoint import complete_steps
from distaff.train.resume import CHECKPOINTS

logger = logging.getLogger("distaff")

VOCAB_SIZE = 4_000
# Two million tokens are too few for dropout to help.
SHAPE = (
    "hidden_size=192,num_hidden_layers=4,num_attention_heads=4,intermediate_size=768,max_position_embeddings=130,"
    "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
)
# More than the usual 15 %: what such a short run lacks is tokens to predict (Wettig et al. 2023, arXiv:2202.08005).
MLM_PROBABILITY = 0.4
# Each tenth paragraph is held out.
HELD_OUT_EACH = 10
TRAIN_FILE, HELD_OUT_FILE = "train.txt", "held_out.txt"
BEFORE_TRAINING = (TRAIN_FILE, HELD_OUT_FILE, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(kw_only=True)
class QuickstartFlags:
    """Flags of `distaff quickstart`."""

    output_dir: str = flag("distaff-quickstart", "Folder for everything that is written.")
    max_steps: int = flag(4_500, "Steps of training.")
    resume_from_checkpoint: bool = flag(False, "Go on from the newest checkpoint of the folder.")
    overwrite_output_dir: bool = flag(False, "Start anew although the folder holds a run.")


def run(flags: QuickstartFlags) -> int:
    """Do the whole job and return the exit code."""
    folder = Path(flags.output_dir)
    going_on = flags.overwrite_output_dir or flags.resume_from_checkpoint
    if flags.output_dir and (folder / "recipe.yaml").exists() and not going_on:
        print(what_is_there(folder))
        return 0
    check(flags, folder)
    output_folder(flags.output_dir)
    train_file, held_out_file = folder / TRAIN_FILE, folder / HELD_OUT_FILE
    if not flags.resume_from_checkpoint:
        write_texts(folder)
        train_tokenizer(
            TokenizerFlags(
                train_file=str(train_file), vocab_size=VOCAB_SIZE, output_dir=str(folder), overwrite_output_dir=True
            )
        )
    code = train(mlm_flags(flags, train_file, held_out_file))
    if code == 0:
        report(folder, held_out_file)
    return code


def check(flags: QuickstartFlags, folder: Path) -> None:
    """Raise `UsageError` before anything is written: for settings that cannot be, and a folder with other things."""
    if flags.max_steps < 1:
        raise UsageError(f"--max_steps is {flags.max_steps}: it must be at least 1.")
    if flags.resume_from_checkpoint and not complete_steps(folder / CHECKPOINTS):
        raise UsageError(f"'{folder}' holds no complete checkpoint to go on from: leave --resume_from_checkpoint out.")
    if flags.resume_from_checkpoint or flags.overwrite_output_dir or not folder.is_dir():
        return
    # What an earlier start wrote before it ended is its own, and made again.
    text = folder / TRAIN_FILE
    begun = text.is_file() and text.read_bytes() == as_lines(split_texts()[0]).encode()
    names = [path.name for path in sorted(folder.iterdir())]
    strange = [name for name in names if not (begun and name in BEFORE_TRAINING)]
    if strange:
        raise UsageError(
            f"'{folder}' is not empty (it holds {listed(strange, 3)}): name another --output_dir, or "
            "--overwrite_output_dir."
        )


def mlm_flags(flags: QuickstartFlags, train_file: Path, held_out_file: Path) -> MlmFlags:
    """Return the flags of the training, as `distaff train mlm` would take them."""
    return MlmFlags(
        output_dir=flags.output_dir,
        resume_from_checkpoint="newest" if flags.resume_from_checkpoint else None,
        overwrite_output_dir=flags.overwrite_output_dir,
        model_type="roberta",
        tokenizer_name=flags.output_dir,
        config_overrides=SHAPE,
        train_file=str(train_file),
        validation_file=str(held_out_file),
        max_seq_length=64,
        mlm_probability=MLM_PROBABILITY,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=min(400, flags.max_steps // 10),
        weight_decay=0.01,
        adam_beta2=0.98,
        max_steps=flags.max_steps,
        logging_steps=100,
        eval_steps=1_000,
        save_steps=1_000,
        save_total_limit=2,
    )


def split_texts() -> tuple[list[str], list[str]]:
    """Return the paragraphs of Python's documentation to train on, and those that are held out."""
    from pydoc_data.topics import topics

    # Topics repeat each other's paragraphs: each counts once, so that nothing held out was seen in training.
    texts = list(dict.fromkeys(line for name in sorted(topics) for line in paragraphs(topics[name])))
    return [text for number, text in enumerate(texts) if number % HELD_OUT_EACH], texts[::HELD_OUT_EACH]


def as_lines(texts: list[str]) -> str:
    """Return the texts, one a line."""
    return "".join(f"{text}\n" for text in texts)


def write_texts(folder: Path) -> None:
    """Write both parts of the documentation, the training texts last."""
    train, held_out = split_texts()
    try:
        (folder / HELD_OUT_FILE).write_text(as_lines(held_out), encoding="utf-8", newline="\n")
        (folder / TRAIN_FILE).write_text(as_lines(train), encoding="utf-8", newline="\n")
    except OSError as error:
        raise DistaffError(f"'{folder}' cannot be written: {error.strerror}.") from error


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a topic, each in one line, without rules of asterisks, dashes and the like."""
    joined = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [line for line in (re.sub(r"([*=\-~^+|.])\1{3,}", "", line).strip() for line in joined) if line]


def unigram_entropy(rows: Iterable[Iterable[int]]) -> float:
    """Return the entropy, in nats a token, of the tokens of `rows`: what a model without context can reach at best."""
    counts = Counter(token for row in rows for token in row)
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def report(folder: Path, held_out_file: Path) -> None:
    """Print the loss beside the unigram entropy, and what the reloaded model fills into five held-out sentences."""
    import json

    from distaff.pipelines import pipeline

    fill = pipeline("fill-mask", str(folder), top_k=3)
    texts = held_out_file.read_text(encoding="utf-8").splitlines()
    entropy = unigram_entropy(fill.tokenizer(texts, add_special_tokens=False)["input_ids"])
    loss = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
    print(f"\nHeld-out text: evaluation loss {loss:.3f}, unigram entropy {entropy:.3f} nats a token.")
    print("Five sentences that the model has not seen, each with a word masked:")
    for sentence, word in masked_sentences(texts, fill.tokenizer, count=5):
        fillings = "  ".join(f"{each['token_str'].strip()} ({each['score']:.2f})" for each in fill(sentence))
        print(f"  {sentence}\n    was: {word}   filled: {fillings}")
    print(f"\nEverything is in {folder}: weights, tokenizer, card, checkpoints and runs/ for TensorBoard.")


def masked_sentences(texts: list[str], tokenizer, *, count: int) -> list[tuple[str, str]]:
    """Return `count` sentences, far apart in the text, each with its middle word of one token masked; and the word."""
    found = []
    for line in texts:
        for sentence in re.findall(r"[A-Z][^.:*\"“]{30,120}\.", line):
            words = sentence.rstrip(".").split()
            middle = len(words) // 2
            pieces = tokenizer(f" {words[middle]}", add_special_tokens=False)["input_ids"]
            if words[middle].isalpha() and len(words[middle]) > 2 and len(pieces) == 1:
                masked = " ".join([*words[:middle], tokenizer.mask_token, *words[middle + 1 :]])
                found.append((f"{masked}.", words[middle]))
    return found[:: max(1, len(found) // count)][:count]


def what_is_there(folder: Path) -> str:
    """Return what an earlier run left, and how to go on."""
    steps = complete_steps(folder / CHECKPOINTS)
    state = f"checkpoints of the steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
    done = (folder / "model.safetensors").exists()
    again = f"distaff quickstart --output_dir {folder}"
    lines = [f"{folder} already holds a run: {state}, {'and the finished model' if done else 'and no finished model'}."]
    lines += (
        [f"  try it:     distaff predict fill-mask {folder} 'The value of the <mask> is returned.'"] if done else []
    )
    lines += [f"  go on:      {again} --resume_from_checkpoint"] if steps else []
    return "\n".join([*lines, f"  start anew: {again} --overwrite_output_dir"])
