"""BART and all its heads."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import CLOSE, config_of, model_class, tensor_inputs
from battery.seq2seq_usage import Seq2SeqBattery
from distaff.core.errors import DistaffError
from distaff.core.tree import flatten
from distaff.models._seq2seq import shift_tokens_right


class TestBart(Seq2SeqBattery):
    family = "bart"
    prefix = "model."
    base, lm, headed = "model", "lm", "classification"
    language_models = ("lm", "lm_odd")
    dropout_fields = ("dropout", "attention_dropout", "activation_dropout")
    shallow: ClassVar = {"encoder_layers": 1, "decoder_layers": 1, "init_std": 0.2}
    layerdrop_fields = ("encoder_layerdrop", "decoder_layerdrop")
    refused = (
        {"activation_function": "no_such_activation"},
        {"decoder_attention_heads": 5},
        {"normalize_before": True},
    )

    def test_positions_can_be_given(self, store):
        """A row padded on the left gets, with its positions, what it gets alone."""
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        real, target = (inputs[name][2].astype(bool) for name in ("attention_mask", "decoder_attention_mask"))
        positions = {
            prefix + "position_ids": np.maximum(np.cumsum(inputs[prefix + "attention_mask"], axis=1) - 1, 0)
            for prefix in ("", "decoder_")
        }
        padded = model(**inputs, **positions).logits[2][target]
        alone = model(inputs["input_ids"][2:, real], decoder_input_ids=inputs["decoder_input_ids"][2:, target]).logits
        np.testing.assert_allclose(padded, alone[0], rtol=0, atol=CLOSE)

    def test_rows_and_positions_beyond_the_table_are_refused(self, store):
        model, ids = store.model(self.cases[self.lm]), np.full((1, 25), 7)
        with pytest.raises(DistaffError, match="25 tokens in input_ids are longer than the 24 positions"):
            model(ids, decoder_input_ids=ids[:, :3])
        with pytest.raises(DistaffError, match="25 tokens in decoder_input_ids are longer than the 24 positions"):
            model(ids[:, :3], decoder_input_ids=ids)
        with pytest.raises(DistaffError, match=r"position_ids\[0, 0\] is 24"):
            model(ids[:, :3], position_ids=np.full((1, 3), 24))
        with pytest.raises(DistaffError, match=r"decoder_position_ids is \[1, 2\]"):
            model(ids[:, :3], decoder_position_ids=np.zeros((1, 2), np.int32))

    @pytest.mark.parametrize("ends", [(1, 2, 1), (0, 0, 0)])
    def test_rows_with_other_numbers_of_ends_are_refused(self, ends, store):
        model = store.model(self.cases["classification"])
        ids = np.full((3, 8), 7)
        for row, count in enumerate(ends):
            ids[row, :count] = 2
        with pytest.raises(DistaffError, match=rf"hold {min(ends)} to {max(ends)} ends of sentence \(token 2\)"):
            model(ids)

    def test_the_bias_is_not_trained(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["gradient"])
        gradients = jax.grad(lambda params: model(**inputs, params=params).logits.sum())(model.params)
        assert not np.asarray(gradients["final_logits_bias"]).any()
        assert not model.decay_mask()["final_logits_bias"]

    def test_random_weights(self):
        """As PyTorch's: normal with init_std, norms 1, biases 0, that of the logits too."""
        case = self.cases[self.lm]
        model = model_class(case)(config_of(case, d_model=96, vocab_size=300, init_std=0.05))
        for path, leaf in flatten(model.params).items():
            if path.endswith("scale"):
                np.testing.assert_array_equal(leaf, 1.0, err_msg=path)
            elif path.endswith("bias"):
                np.testing.assert_array_equal(leaf, 0.0, err_msg=path)
            else:
                assert abs(np.asarray(leaf).std() / 0.05 - 1) < 4 / np.sqrt(2 * leaf.size), path


LABELS = np.array([[4, 5, 1, -100, -100], [7, 8, 9, 6, -100]])


@pytest.mark.parametrize("as_jax", [False, True])
def test_labels_are_shifted_behind_the_start(as_jax):
    labels = jnp.asarray(LABELS) if as_jax else LABELS
    found = shift_tokens_right(labels, 0, 2)
    np.testing.assert_array_equal(found, [[2, 4, 5, 1, 0], [2, 7, 8, 9, 6]])
    # mBART's: the last token that is no padding is the language, and comes first.
    np.testing.assert_array_equal(shift_tokens_right(labels, 0), [[1, 4, 5, 1, 0], [6, 7, 8, 9, 6]])
    assert isinstance(found, jnp.ndarray if as_jax else np.ndarray)
