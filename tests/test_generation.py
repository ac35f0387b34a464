"""`generate` against PyTorch, token for token."""

from typing import Any

import jax
import numpy as np
import pytest

import distaff
from golden import generation_cases as golden

STORED = golden.read()
TOLERANCE = 1e-4


class Models:
    """Loaded once each: programs are kept by the model."""

    def __init__(self, folder):
        self.folder, self.loaded = folder, {}

    def __call__(self, name: str) -> Any:
        if name not in self.loaded:
            folder = golden.write(name, STORED["keys"][name], self.folder / name)
            self.loaded[name] = getattr(distaff, f"Flax{golden.MODELS[name][0]}").from_pretrained(folder)
        return self.loaded[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("generation"))


def answer(models: Models, case: str, **more: Any) -> Any:
    name, options = golden.CASES[case]
    ids, mask = golden.prompts(name)
    pad = {"pad_token_id": golden.PAD} if name == "gpt2" else {}
    return models(name).generate(ids, mask, **options, **pad, **more)


AVAILABLE = [case for case, (name, _) in golden.CASES.items() if hasattr(distaff, f"Flax{golden.MODELS[name][0]}")]


@pytest.mark.parametrize("case", AVAILABLE)
def test_tokens_and_scores_are_those_of_pytorch(models, case):
    expected, found = STORED["answers"][case], answer(models, case)
    sequences = np.asarray(expected["sequences"])
    width = sequences.shape[1] - found.sequences.shape[1]
    start = found.sequences.shape[1] - int(found.lengths.max())
    assert width == 0
    for row, length in enumerate(found.lengths):
        # PyTorch fills up with the ending token where the pad token is 0.
        np.testing.assert_array_equal(found.sequences[row, : start + length], sequences[row, : start + length])
    np.testing.assert_allclose(found.scores, expected["scores"], rtol=0, atol=TOLERANCE)
