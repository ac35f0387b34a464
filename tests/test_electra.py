"""ELECTRA and all its heads."""

import jax
import numpy as np
import pytest

import distaff
from battery import Battery
from battery.family import TOLERANCE, assert_parity, flat_outputs, model_class, tensor_inputs
from distaff.core.errors import ConfigError
from distaff.core.tree import flatten
from distaff.hub import open_checkpoint
from golden import cases as golden


class TestElectra(Battery):
    family = "electra"
    base, masked_lm, classifier = "model", "masked_lm", "classification"
    refused = (
        {"hidden_act": "no_such_activation"},
        {"summary_activation": "no_such_activation"},
        {"summary_type": "attn"},
        {"add_cross_attention": True},
    )

    def test_names_of_old_files(self, tmp_path):
        """gamma and beta, a buffer of position ids, and the second name of the tied tensor."""

        def older(state):
            renamed = {}
            for key, value in state.items():
                if "norm" in key.lower():
                    key = key.replace(".weight", ".gamma").replace(".bias", ".beta")
                renamed[key] = value
            renamed["electra.embeddings.position_ids"] = np.arange(8)[None]
            renamed["generator_lm_head.weight"] = state["electra.embeddings.word_embeddings.weight"]
            return renamed

        case = self.cases["masked_lm"]
        model = model_class(case).from_pretrained(golden.write(case, tmp_path, change=older))
        assert not model.loading_report.new
        assert not model.loading_report.unused
        assert_parity(case, model)
        model.save_pretrained(tmp_path / "again")
        assert set(open_checkpoint(tmp_path / "again")) == set(case.keys)

    def test_head_of_its_own_in_a_tied_config(self, tmp_path):
        """As Transformers has it, a head with other values than the embeddings is not tied."""
        case, untied = self.cases["masked_lm"], self.cases["masked_lm_untied"]
        name = "generator_lm_head.weight"

        def change(state):
            return {**state, name: golden.tensor(name, untied.keys[name])}

        folder = golden.write(case, tmp_path, change=change, hidden_act=untied.config["hidden_act"])
        assert_parity(untied, model_class(case).from_pretrained(folder))

    def test_outputs_are_objects_and_tuples(self, store):
        case = self.cases["model"]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        outputs = model(**inputs)
        assert list(outputs.keys()) == ["last_hidden_state"]  # there is no pooler
        np.testing.assert_array_equal(outputs[0], outputs["last_hidden_state"])
        plain = model(**inputs, return_dict=False)
        assert isinstance(plain, tuple)
        np.testing.assert_array_equal(plain[0], outputs[0])

    def test_generator_is_as_narrow_as_its_embeddings(self, store):
        """A projection stands between embeddings and layers only where their widths differ."""
        shapes = {name: leaf.shape for name, leaf in flatten(store.model(self.cases["masked_lm"]).params).items()}
        assert shapes["electra/embeddings/word_embeddings/embedding"] == (64, 16)
        assert shapes["electra/embeddings_project/kernel"] == (16, 32)
        assert shapes["lm_head/dense/kernel"] == (32, 16)
        assert "lm_head/decoder/kernel" not in shapes
        untied = {
            name: leaf.shape for name, leaf in flatten(store.model(self.cases["masked_lm_untied"]).params).items()
        }
        assert untied["lm_head/decoder/kernel"] == (16, 64)
        odd = flatten(store.model(self.cases["masked_lm_odd"]).params)
        assert not any("embeddings_project" in name for name in odd)

    @pytest.mark.parametrize("name", ["summary_first_dropout", "summary_last_dropout"])
    def test_each_dropout_of_the_summary_is_used(self, name):
        case = self.cases["multiple_choice"]
        inputs = tensor_inputs(case.runs["choices"])
        quiet = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "summary_last_dropout"), 0.0)
        for rate in (0.0, 0.5):
            model = self.one_layer(case, config={**quiet, name: rate})
            trained = model(**inputs, dropout_rng=jax.random.key(0), train=True).logits
            difference = float(np.abs(trained - model(**inputs).logits).max())
            assert difference > 1e-3 if rate else difference < TOLERANCE

    def test_projection_to_labels_is_refused(self, store):
        case = self.cases["multiple_choice"]
        with pytest.raises(ConfigError, match="summary_proj_to_labels"):
            model_class(case).from_pretrained(store.folder(case, summary_proj_to_labels=True))

    def test_auto_classes_of_a_pretrained_pair(self, store):
        """The discriminator is the pretraining model, the generator the masked one."""
        case = self.cases["pretraining"]
        model = distaff.FlaxAutoModelForPreTraining.from_pretrained(store.folder(case))
        inputs = tensor_inputs(case.runs["mixed"])
        assert flat_outputs(model(**inputs))["logits"].shape == inputs["input_ids"].shape
