"""The models of the golden generations, and what is looked at in an answer."""

from typing import Any

import distaff
from golden import generation_cases as golden


class GoldenModels:
    """Loaded once each: programs are kept by the model."""

    def __init__(self, folder):
        self.folder, self.loaded = folder, {}
        self.keys = golden.read()["keys"]

    def __call__(self, name: str) -> Any:
        if name not in self.loaded:
            folder = golden.write(name, self.keys[name], self.folder / name)
            self.loaded[name] = getattr(distaff, f"Flax{golden.MODELS[name][0]}").from_pretrained(folder)
        return self.loaded[name]


def new_tokens(outputs: Any, row: int) -> list[int]:
    """Return the tokens that a row got."""
    start = outputs.sequences.shape[1] - int(outputs.lengths.max())
    return outputs.sequences[row, start : start + outputs.lengths[row]].tolist()
