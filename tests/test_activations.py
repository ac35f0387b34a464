"""Every activation by its name in configs, against PyTorch, in a GPT-2 of one layer."""

import pytest

from battery.family import assert_parity, model_class
from distaff.nn.act import ACTIVATIONS
from golden import cases as golden

CASES = golden.read("activations")


def test_every_activation_has_a_case():
    assert CASES.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", CASES)
def test_values_equal_pytorch(name, tmp_path):
    case = CASES[name]
    assert_parity(case, model_class(case).from_pretrained(golden.write(case, tmp_path)))
