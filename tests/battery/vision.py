"""Checks of families of images: pixels in the only order there is, sizes, and what all families pass."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import CLOSE, config_of, model_class, tensor_inputs
from battery.files import FileChecks
from battery.loading import LoadingChecks
from battery.numbers import NumberChecks
from battery.usage import UsageChecks
from distaff.core.errors import DistaffError


class VisionBattery(FileChecks, LoadingChecks):
    """Everything for a family with a base model and `ForImageClassification`."""

    base, lm, headed = "model", "classification", "classification"
    wide: ClassVar[dict[str, Any]]

    assert_same_gradients = NumberChecks.assert_same_gradients
    test_bfloat16_compute_is_close = NumberChecks.test_bfloat16_compute_is_close
    test_casting = NumberChecks.test_casting
    test_eight_devices_change_nothing = NumberChecks.test_eight_devices_change_nothing
    test_init_weights_keeps_what_is_given = UsageChecks.test_init_weights_keeps_what_is_given
    test_remat_changes_nothing = NumberChecks.test_remat_changes_nothing

    def test_head_into_base(self, store):
        base, case = self.cases[self.base], self.cases[self.headed]
        model = model_class(base).from_pretrained(store.folder(case))
        assert set(model.loading_report.unused) == self.head_keys(case)
        assert set(model.loading_report.new) == {key for key in base.keys if self.prefix + key not in case.keys}
        inputs = tensor_inputs(case.runs["mixed"])
        headed = store.model(case)(**inputs, output_hidden_states=True).hidden_states
        for one, other in zip(headed, model(**inputs, output_hidden_states=True).hidden_states, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=CLOSE)

    def test_outputs_are_objects_and_tuples(self, store):
        case = self.cases[self.base]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        outputs = model(**inputs)
        assert list(outputs.keys()) == ["last_hidden_state", "pooler_output"]
        plain = model(**inputs, return_dict=False)
        assert isinstance(plain, tuple)
        np.testing.assert_array_equal(plain[0], outputs.last_hidden_state)
        asked = model_class(case).from_pretrained(store.folder(case, output_hidden_states=True))
        assert asked(**inputs).hidden_states is not None
        assert asked(**inputs, output_hidden_states=False).hidden_states is None

    def test_bare_module(self, store):
        case = self.cases[self.headed]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        shapes = jax.eval_shape(model.module.init, jax.random.key(0), **inputs)
        variables = model.params if "batch_stats" in shapes else {"params": model.params}
        assert jax.tree.structure(shapes) == jax.tree.structure(variables)
        found = jax.jit(model.module.apply)(variables, **inputs).logits
        np.testing.assert_allclose(found, model(**inputs).logits, rtol=0, atol=CLOSE)
        # Lists and float64 are pixels too.
        pixels = inputs["pixel_values"]
        np.testing.assert_array_equal(model(pixels.tolist()).logits, model(pixels.astype(np.float64)).logits)

    def test_random_weights_are_of_the_seed(self):
        case = self.cases[self.headed]
        build, config = model_class(case), config_of(case)
        one, same, other = (jax.tree.leaves(build(config, seed=seed).params) for seed in (5, 5, 6))
        assert all(np.array_equal(*pair) for pair in zip(one, same, strict=True))
        differ = [not np.array_equal(*pair) for pair in zip(one, other, strict=True) if pair[0].ndim > 1]
        assert differ
        assert all(differ)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda pixels: pixels.transpose(0, 2, 3, 1), "transpose"),
            (lambda pixels: pixels[:, :, :, : pixels.shape[1]], "axis 1 or 3"),
            (lambda pixels: pixels[:, :1].repeat(2, 1), "image processor"),
            (lambda pixels: pixels[0], "batch, channels, height, width"),
            (lambda pixels: pixels.astype(np.uint8), "uint8"),
            (lambda pixels: pixels[:, :, :0], "without a pixel"),
        ],
    )
    def test_other_layouts_are_refused(self, change, words, store):
        case = self.cases[self.headed]
        model, pixels = store.model(case), case.runs["mixed"].inputs["pixel_values"]
        with pytest.raises(DistaffError, match=words) as caught:
            model(change(pixels))
        assert "\n" not in str(caught.value)
        with pytest.raises(DistaffError, match=words):
            jax.eval_shape(lambda pixels: model(pixels), jnp.asarray(change(pixels)))
