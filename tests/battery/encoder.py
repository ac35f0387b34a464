"""Checks of encoders with a masked LM alone: pooled output, token types, logits at chosen positions, old names."""

from typing import ClassVar

import jax
import numpy as np
import pytest

from battery.family import CLOSE, assert_parity, layers_of, model_class, tensor_inputs
from battery.files import FileChecks
from battery.loading import LoadingChecks
from battery.numbers import NumberChecks
from battery.usage import UsageChecks
from distaff.core.errors import DistaffError
from distaff.hub import open_checkpoint
from golden import cases as golden


class Battery(FileChecks, LoadingChecks, NumberChecks, UsageChecks):
    """Everything for a family of encoders with `masked_lm` and `classifier` cases."""

    masked_lm: str
    classifier: str
    refused = ({"hidden_act": "no_such_activation"},)
    layer_bias = "encoder.layer.{}.attention.self.query.bias"
    layer_weight = "encoder.layer.{}.output.dense.weight"
    dropout = ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout")
    shallow: ClassVar = {"num_hidden_layers": 1, "initializer_range": 0.2}
    wide: ClassVar = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 300, "initializer_range": 0.03}
    huge: ClassVar = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
        "num_hidden_layers": 24,
    }

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.lm, cls.headed = cls.masked_lm, cls.classifier

    def first_position(self, case: golden.Case) -> int:
        return case.config["pad_token_id"] + 1 if self.left_padding_is_free else 0

    def test_names_of_old_files(self, tmp_path):
        """gamma and beta, a buffer of position ids, and the second name of a tied tensor."""

        def older(state):
            renamed = {}
            for key, value in state.items():
                if "norm" in key.lower():
                    key = key.replace(".weight", ".gamma").replace(".bias", ".beta")
                renamed[key] = value
            renamed[f"{self.prefix}embeddings.position_ids"] = np.arange(8)[None]
            bias = next(key for key in state if key in ("cls.predictions.bias", "lm_head.bias"))
            renamed[bias.replace("bias", "decoder.bias")] = state[bias]
            words = state[f"{self.prefix}embeddings.word_embeddings.weight"]
            renamed[bias.replace("bias", "decoder.weight")] = words
            return renamed

        case = self.cases[self.masked_lm]
        model = model_class(case).from_pretrained(golden.write(case, tmp_path, change=older))
        assert not model.loading_report.new
        assert not model.loading_report.unused
        assert_parity(case, model)
        model.save_pretrained(tmp_path / "again")
        assert set(open_checkpoint(tmp_path / "again")) == set(case.keys)

    def test_outputs_are_objects_and_tuples(self, store):
        case = self.cases[self.base]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        outputs = model(**inputs)
        np.testing.assert_array_equal(outputs.last_hidden_state, outputs["last_hidden_state"])
        np.testing.assert_array_equal(outputs.last_hidden_state, outputs[0])
        assert list(outputs.keys()) == ["last_hidden_state", "pooler_output"]
        assert outputs.hidden_states is None
        assert isinstance(outputs[:2], tuple)
        assert len(outputs.to_tuple()) == 2
        assert len(jax.tree.leaves(outputs)) == 2
        doubled = jax.tree.map(lambda leaf: leaf * 2, outputs)
        assert type(doubled) is type(outputs)
        np.testing.assert_array_equal(doubled.pooler_output, 2 * outputs.pooler_output)
        plain = model(**inputs, return_dict=False)
        assert isinstance(plain, tuple)
        np.testing.assert_array_equal(plain[0], outputs[0])
        full = model(**inputs, output_hidden_states=True, output_attentions=True)
        layers = layers_of(case)
        assert (len(full.hidden_states), len(full.attentions)) == (layers + 1, layers)
        np.testing.assert_array_equal(full.hidden_states[-1], full.last_hidden_state)
        for weights in full.attentions:
            np.testing.assert_allclose(weights.sum(-1), np.ones(weights.shape[:-1]), rtol=0, atol=CLOSE)

    def test_masked_positions_give_the_same_logits(self, store):
        case = self.cases[self.masked_lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        positions = np.array([[0, 3, 7], [1, 4, 0], [5, 5, 3]], np.int32)
        full = np.asarray(model(**inputs).logits)
        expected = np.take_along_axis(full, positions[..., None], axis=1)
        found = model(**inputs, masked_positions=positions).logits
        assert found.shape == (3, 3, case.config["vocab_size"])
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)
        bare = jax.jit(model.module.apply)({"params": model.params}, **inputs, masked_positions=positions)
        np.testing.assert_allclose(bare.logits, expected, rtol=0, atol=CLOSE)

    def test_wrong_inputs_are_refused(self, store):
        case = self.cases[self.masked_lm]
        model, ids = store.model(case), case.runs["mixed"].inputs["input_ids"]
        with pytest.raises(DistaffError, match="float"):
            model(ids.astype(np.float32))
        with pytest.raises(DistaffError, match="input_ids"):
            model(ids[0])
        with pytest.raises(DistaffError, match="max_position_embeddings"):
            model(np.tile(ids, 20))
        with pytest.raises(DistaffError, match="token_type"):
            model(ids, token_type_ids=np.full_like(ids, case.config["type_vocab_size"]))
        with pytest.raises(DistaffError, match="position"):
            model(ids, position_ids=np.full_like(ids, case.config["max_position_embeddings"]))
        for length in (7, 1):
            with pytest.raises(DistaffError, match="attention_mask"):
                model(ids, attention_mask=np.ones((3, length), np.int32))
        with pytest.raises(DistaffError, match="masked_positions"):
            model(ids, masked_positions=np.full((3, 2), 8))
