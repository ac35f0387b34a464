"""`distaff predict ...`: the pipelines on the command line."""

import json
import sys
from dataclasses import dataclass

from distaff.core.errors import DataError, UsageError
from distaff.pipelines import pipeline
from distaff.tasks._flags import flag


@dataclass(kw_only=True)
class FillMaskFlags:
    """Flags of `distaff predict fill-mask`."""

    model_name_or_path: str = flag("", "Folder or Hub id of a masked language model; may stand first.", required=True)
    texts: list[str] = flag([], "Texts with a mask token; may follow the model, or come from standard input.")
    top_k: int = flag(5, "Fillings a mask.")
    json: bool = flag(False, "Print a line of JSON a text.")


def read_lines() -> list[str]:
    """Return the lines of standard input that are not blank."""
    try:
        return [line.rstrip("\n") for line in sys.stdin if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(
            f"Standard input is not {error.encoding} (byte 0x{error.object[error.start]:02x}): convert it, for "
            "instance with 'iconv -t utf-8'."
        ) from error


def fill_mask(flags: FillMaskFlags) -> int:
    """Print the best fillings of each text."""
    texts = flags.texts or read_lines()
    if not texts:
        raise UsageError("There is no text: write it after the model, or pipe lines in.")
    if flags.top_k < 1:
        raise UsageError(f"--top_k is {flags.top_k}: it must be at least 1.")
    fill = pipeline("fill-mask", flags.model_name_or_path, top_k=flags.top_k)
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"The text {text!r} is not UTF-8: convert it, for instance with 'iconv -t utf-8'.")
        fillings = fill(text)
        if flags.json:
            print(json.dumps({"text": text, "fillings": fillings}, ensure_ascii=False))
            continue
        print(text)
        for mask in fillings if isinstance(fillings[0], list) else [fillings]:
            print("  " + "  ".join(f"{filling['token_str'].strip()} {filling['score']:.3f}" for filling in mask))
    return 0
