"""The battery's comparison with PyTorch notices one changed weight, another activation, another eps."""

import numpy as np
import pytest

from battery.family import assert_parity, model_class
from golden import cases as golden

FAMILIES = {family: golden.read(family) for family in ("bert", "roberta")}


def load(case, folder, **options):
    return model_class(case).from_pretrained(golden.write(case, folder, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_weight_is_noticed(family, tmp_path):
    """Each tensor of the masked-LM model, one number of it changed by 0.01."""
    case = FAMILIES[family]["masked_lm"]
    model = load(case, tmp_path / "sound")
    assert_parity(case, model)
    first_real_position = case.config["pad_token_id"] + 1 if family == "roberta" else 0
    unnoticed = []
    for name, shape in case.keys.items():
        # A row of the table that the inputs use; a change of all keys' bias is invisible to a softmax.
        index = (first_real_position, 0) if "position_embeddings" in name else (0,) * len(shape)

        def change(state, name=name, index=index):
            state[name][index] += 1e-2
            return state

        model.params = load(case, tmp_path / "changed", change=change).params
        try:
            assert_parity(case, model)
        except AssertionError:
            continue
        unnoticed.append(name)
    assert all(name.endswith("attention.self.key.bias") for name in unnoticed), unnoticed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["model_odd", "masked_lm_odd"])
@pytest.mark.parametrize("fields", [{"hidden_act": "gelu"}, {"layer_norm_eps": 1e-5}, {"num_attention_heads": 4}])
def test_another_config_is_noticed(family, name, fields, tmp_path):
    case = FAMILIES[family][name]
    with pytest.raises(AssertionError):
        assert_parity(case, load(case, tmp_path, **fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_another_gradient_is_noticed(family):
    """The stored pair of numbers tells a gradient from one with two entries exchanged, and from its negative."""
    name, shape = "encoder.layer.0.output.dense.weight", (4, 6)
    gradient = golden.tensor(name, shape)
    swapped = gradient.copy()
    swapped[0, 0], swapped[1, 1] = gradient[1, 1], gradient[0, 0]
    assert abs(golden.summary(name, gradient)[1] - golden.summary(name, swapped)[1]) > 1e-3
    assert abs(golden.summary(name, gradient)[1] - golden.summary(name, -gradient)[1]) > 1e-3
    np.testing.assert_allclose(golden.summary(name, gradient), golden.summary(name, np.array(gradient)))
