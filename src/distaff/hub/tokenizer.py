"""Opening the tokenizer of a folder."""

from pathlib import Path
from typing import Any

from distaff.core.errors import CheckpointError, listed

# One of these holds the vocabulary, whatever the class of the tokenizer is.
VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)


def _check_config(folder: Path) -> None:
    """Raise `CheckpointError` where it is the config, read to find the tokenizer's class, that does not open."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return
    try:
        AutoConfig.from_pretrained(folder)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(f"'{folder / 'config.json'}' is not a config that opens: {reason}.") from error


def open_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that `AutoTokenizer` finds in `folder`.

    Raises `CheckpointError` where there is none: from a config alone Transformers makes one without a vocabulary.
    """
    from transformers import AutoTokenizer

    remedy = "name one with --tokenizer_name, or make one with 'distaff tokenizer train'"
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise CheckpointError(f"'{folder}' holds no tokenizer (none of {listed(VOCABULARIES)}): {remedy}.")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # each tokenizer class raises its own
        _check_config(folder)
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise CheckpointError(f"The tokenizer in '{folder}' does not open ({reason}): {remedy}.") from error
