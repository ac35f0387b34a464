"""`distaff predict ...`: the pipelines on the command line."""

import json
import sys
from dataclasses import dataclass

from distaff.core.errors import UsageError
from distaff.pipelines import pipeline
from distaff.tasks._flags import flag
from distaff.tasks._lines import check_words, lines_of


@dataclass(kw_only=True)
class FillMaskFlags:
    """Flags of `distaff predict fill-mask`."""

    model_name_or_path: str = flag("", "Folder or Hub id of a masked language model; may stand first.", required=True)
    texts: list[str] = flag([], "Texts with a mask token; may follow the model, or come from standard input.")
    top_k: int = flag(5, "Fillings a mask.")
    json: bool = flag(False, "Print a line of JSON a text.")


def fill_mask(flags: FillMaskFlags) -> int:
    """Print the best fillings of each text."""
    texts = flags.texts or list(lines_of(sys.stdin, "Standard input"))
    if not texts:
        raise UsageError("There is no text: write it after the model, or pipe lines in.")
    if flags.top_k < 1:
        raise UsageError(f"--top_k is {flags.top_k}: it must be at least 1.")
    check_words(texts)
    fill = pipeline("fill-mask", flags.model_name_or_path, top_k=flags.top_k)
    for text in texts:
        fillings = fill(text)
        if flags.json:
            print(json.dumps({"text": text, "fillings": fillings}, ensure_ascii=False))
            continue
        print(text)
        for mask in fillings if isinstance(fillings[0], list) else [fillings]:
            print("  " + "  ".join(f"{filling['token_str'].strip()} {filling['score']:.3f}" for filling in mask))
    return 0
