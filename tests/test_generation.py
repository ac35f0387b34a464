"""`generate` against PyTorch, token for token."""

import numpy as np
import pytest

from distaff.generation.filters import candidates, spread
from generation_models import GoldenModels
from golden import generation_cases as golden

STORED = golden.read()
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return GoldenModels(tmp_path_factory.mktemp("generation"))


@pytest.mark.parametrize("case", golden.CASES)
def test_tokens_and_scores_are_those_of_pytorch(models, case):
    name, options = golden.CASES[case]
    ids, mask = golden.prompts(name)
    given = {**options, **golden.always(name)}
    if "stop_strings" in options:
        given["tokenizer"] = golden.tokenizer(name)
    expected, found = STORED["answers"][case], models(name).generate(ids, mask, **given)
    sequences = np.asarray(expected["sequences"])
    assert found.sequences.shape == sequences.shape
    start = found.sequences.shape[1] - int(found.lengths.max())
    for row, length in enumerate(found.lengths):
        # Beam search of PyTorch fills up with the ending token where the pad token is 0.
        np.testing.assert_array_equal(found.sequences[row, : start + length], sequences[row, : start + length])
    np.testing.assert_allclose(found.scores, expected["scores"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", golden.FILTERS)
def test_sampling_leaves_what_pytorch_leaves(name):
    kind, arguments = name.removesuffix("_tiny"), golden.FILTERS[name][1]
    (value,) = arguments.values()
    names, top_k = ((), value) if kind == "top_k" else ((kind,), 0)
    scores = golden.filter_scores()
    found = candidates(scores, {kind: np.float32(value)}, names=names, top_k=top_k, keep=1)
    left = np.isfinite(spread(*found, scores.shape[1]))
    assert [np.flatnonzero(row).tolist() for row in left] == STORED["filters"][name]
