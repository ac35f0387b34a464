"""ViT and its head for images."""

import copy
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import distaff
from battery import VisionBattery
from battery.family import CLOSE, assert_trees_equal, config_of, model_class, tensor_inputs
from battery.numbers import NumberChecks
from battery.usage import UsageChecks
from distaff.core.errors import DistaffError
from distaff.nn.patches import resized_positions
from golden import cases as golden


class TestViT(VisionBattery):
    family = "vit"
    layer_bias = "encoder.layer.{}.attention.attention.query.bias"
    layer_weight = "encoder.layer.{}.output.dense.weight"
    dropout = ("attention_probs_dropout_prob", "hidden_dropout_prob")
    shallow: ClassVar = {"num_hidden_layers": 1, "initializer_range": 0.2}
    wide: ClassVar = {"hidden_size": 128, "intermediate_size": 256, "image_size": 32, "initializer_range": 0.03}
    refused = (
        {"hidden_act": "no_such_activation"},
        {"pooler_act": "no_such_activation"},
        {"num_attention_heads": 5},
        {"patch_size": 17},
        {"image_size": [16, 0]},
    )
    test_scan_changes_nothing = NumberChecks.test_scan_changes_nothing
    test_scanned_random_weights_equal_those_of_the_loop = (
        UsageChecks.test_scanned_random_weights_equal_those_of_the_loop
    )
    test_random_weights = UsageChecks.test_random_weights
    test_dropout_follows_the_key = UsageChecks.test_dropout_follows_the_key
    test_each_dropout_rate_is_used = UsageChecks.test_each_dropout_rate_is_used
    test_jit_grad_and_vmap = UsageChecks.test_jit_grad_and_vmap

    def test_other_sizes_need_interpolation(self, store):
        case = self.cases["model"]
        model, pixels = store.model(case), case.runs["grown"].inputs["pixel_values"]
        with pytest.raises(DistaffError, match="interpolate_pos_encoding=True") as caught:
            model(pixels)
        assert "24 x 36" in str(caught.value)
        with pytest.raises(DistaffError, match="no patch"):
            model(pixels[:, :, :2], interpolate_pos_encoding=True)
        # At the trained size there is nothing between.
        same = case.runs["mixed"].inputs["pixel_values"]
        np.testing.assert_array_equal(*(model(same, interpolate_pos_encoding=flag)[0] for flag in (False, True)))

    def test_resized_positions_are_those_of_interpolation(self, store, tmp_path):
        case = self.cases["model"]
        pixels = case.runs["grown"].inputs["pixel_values"]
        model = copy.copy(store.model(case))
        wanted = model(pixels, interpolate_pos_encoding=True).last_hidden_state
        model.resize_positions((24, 36))
        np.testing.assert_allclose(model(pixels).last_hidden_state, wanted, rtol=0, atol=CLOSE)
        assert store.model(case).config.image_size == 16
        model.save_pretrained(tmp_path)
        again = distaff.FlaxViTModel.from_pretrained(tmp_path)
        np.testing.assert_allclose(again(pixels).last_hidden_state, wanted, rtol=0, atol=CLOSE)

    def test_a_trained_grid_that_is_not_square(self, store):
        """PyTorch takes every trained grid for square; here a picture twice as large keeps its sides apart."""
        columns = jnp.tile(jnp.arange(5.0)[None], (3, 1)).reshape(15, 1)
        grown = np.asarray(resized_positions(columns, (3, 5), (6, 10))).reshape(6, 10)
        np.testing.assert_allclose(grown, np.tile(grown[:1], (6, 1)), rtol=0, atol=CLOSE)
        assert (np.diff(grown[0])[1:-1] > 0).all()
        case = self.cases["model_one_layer"]
        model, pixels = store.model(case), np.zeros((1, 3, 16, 40), np.float32)
        assert model(pixels, interpolate_pos_encoding=True).last_hidden_state.shape == (1, 41, 24)

    def test_without_pooler(self):
        case = self.cases["tiny_model"]
        model = model_class(case)(config_of(case), add_pooling_layer=False)
        assert "pooler" not in model.params
        assert model(**tensor_inputs(case.runs["mixed"])).pooler_output is None

    def test_a_mask_token_is_ignored(self, tmp_path):
        """The one of masked image modeling stands in some published checkpoints."""
        case = self.cases["model"]
        extra = {"embeddings.mask_token": np.zeros((1, 1, 32), np.float32)}
        folder = golden.write(case, tmp_path, change=lambda state: {**state, **extra})
        assert not model_class(case).from_pretrained(folder).loading_report.unused

    def test_published_sizes(self):
        """ViT-B/16 of google/vit-base-patch16-224 has 86,567,656 parameters."""
        config = config_of(self.cases["classification"])
        big = type(config)(num_labels=1000)
        assert distaff.FlaxViTForImageClassification(big, _do_init=False).num_params() == 86_567_656

    def test_patches_are_a_convolution(self, store):
        case = self.cases["model_odd"]
        model, pixels = store.model(case), case.runs["mixed"].inputs["pixel_values"]
        projection = model.params["embeddings"]["projection"]
        convolved = jax.lax.conv_general_dilated(
            jnp.asarray(pixels), projection["kernel"], (3, 5), "VALID", dimension_numbers=("NCHW", "HWIO", "NHWC")
        )
        expected = convolved.reshape(3, 9, 24) + projection["bias"][None, None]
        positions = model.params["embeddings"]["position_embeddings"][:, 1:]
        found = model(pixels, output_hidden_states=True).hidden_states[0][:, 1:] - positions
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


# What `state_dict()` of Transformers 5 names the parts of layer 0, and what `save_pretrained` writes.
IN_MEMORY = """
attention.q_proj attention.attention.query; attention.k_proj attention.attention.key
attention.v_proj attention.attention.value; attention.o_proj attention.output.dense
layernorm_before layernorm_before; layernorm_after layernorm_after
mlp.fc1 intermediate.dense; mlp.fc2 output.dense
"""


@pytest.mark.parametrize("name", ["FlaxViTModel", "FlaxViTForImageClassification"])
def test_names_in_memory_are_read(name, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    model = getattr(distaff, name)(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = dict(reversed(pair.split()) for pair in IN_MEMORY.replace("\n", ";").split(";") if pair.strip())
    renamed = {}
    for key, tensor in tensors.items():
        start, layer, rest = key.partition("encoder.layer.")
        number, _, part = rest.partition(".")
        stem, _, leaf = part.rpartition(".")
        renamed[f"{start}layers.{number}.{parts[stem]}.{leaf}" if layer else key] = tensor
    assert len(renamed.keys() - tensors.keys()) == 2 * 16
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = getattr(distaff, name).from_pretrained(tmp_path)
    assert_trees_equal(again.params, model.params)
    assert not again.loading_report.new
    assert not again.loading_report.unused
