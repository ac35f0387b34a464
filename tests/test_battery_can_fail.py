"""The battery's comparison with PyTorch notices one changed weight, another activation, another eps."""

import numpy as np
import pytest

from battery.family import assert_parity, model_class
from golden import cases as golden

# One of each kind: the comparison is the same for all families.
FAMILIES = {family: golden.read(family) for family in ("roberta", "gpt_neo", "vit", "resnet")}
LM = {"roberta": "masked_lm", "gpt_neo": "causal_lm"}
# A class token or a mean over all places shows less than hidden states do, and a channel that ReLU closes nothing: here
# a whole tensor is changed.
IMAGES = {"vit": "model", "resnet": "model"}
LM |= IMAGES
# The first row of the table of positions that inputs use, where it is not 0.
FIRST_POSITION = {"roberta": 2}
OTHER_CONFIGS = [
    ("roberta", "model_odd", {"hidden_act": "gelu"}),
    ("roberta", "masked_lm_odd", {"layer_norm_eps": 1e-5}),
    ("roberta", "masked_lm_odd", {"num_attention_heads": 4}),
    ("gpt_neo", "causal_lm_odd", {"activation_function": "gelu"}),
    ("gpt_neo", "causal_lm_odd", {"layer_norm_epsilon": 1e-5}),
    ("gpt_neo", "causal_lm_odd", {"num_heads": 4}),
    ("gpt_neo", "causal_lm_odd", {"window_size": 3}),
    ("gpt_neo", "causal_lm_odd", {"attention_layers": ["local", "global", "local"]}),
    ("vit", "model_odd", {"hidden_act": "gelu"}),
    ("vit", "classification_odd", {"layer_norm_eps": 1e-5}),
    ("vit", "classification_odd", {"num_attention_heads": 4}),
    ("resnet", "model_odd", {"hidden_act": "gelu_new"}),
    ("resnet", "model_odd", {"downsample_in_bottleneck": False}),
]


def load(case, folder, **options):
    return model_class(case).from_pretrained(golden.write(case, folder, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_weight_is_noticed(family, tmp_path):
    """Each tensor of a model, one number of it changed by 0.01."""
    case = FAMILIES[family][LM[family]]
    model = load(case, tmp_path / "sound")
    assert_parity(case, model)
    first_real_position = FIRST_POSITION.get(family, 0)
    unnoticed = []
    for name, shape in case.keys.items():
        # A row of the table that the inputs use; a change of all keys' bias is invisible to a softmax.
        index = (first_real_position, 0) if "position" in name and len(shape) == 2 else (0,) * len(shape)

        def change(state, name=name, index=index):
            if family in IMAGES:
                return {**state, name: (state[name] * 1.2).astype(state[name].dtype)}
            state[name][index] += 1e-2
            return state

        model.params = load(case, tmp_path / "changed", change=change).params
        try:
            assert_parity(case, model)
        except AssertionError:
            continue
        unnoticed.append(name)
    # Nothing is computed from a count of batches.
    free = ("attention.self.key.bias", "attention.attention.key.bias", "k_proj.bias", "num_batches_tracked")
    assert all(name.endswith(free) for name in unnoticed), unnoticed


@pytest.mark.parametrize(("family", "name", "fields"), OTHER_CONFIGS)
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
