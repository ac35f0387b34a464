"""Checks of loading: base and head, prefixes, old names, and what is refused."""

import jax
import numpy as np
import pytest

import distaff
from battery.family import Common, assert_parity, assert_trees_equal, model_class
from distaff.core.errors import CheckpointError, ConfigError, DistaffError
from distaff.core.tree import flatten
from distaff.hub import open_checkpoint
from golden import cases as golden

AUTO_HEADS = (
    "ForPreTraining",
    "ForMaskedLM",
    "ForCausalLM",
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


class LoadingChecks(Common):
    @property
    def prefix(self) -> str:
        return f"{model_class(self.cases[self.base]).base_model_prefix}."

    def head_keys(self, case: golden.Case) -> set[str]:
        return {name for name in case.keys if not name.startswith(self.prefix)}

    def test_auto_class_finds_the_class(self, case, store):
        head = next((head for head in AUTO_HEADS if case.class_name.endswith(head)), "")
        model = getattr(distaff, f"FlaxAutoModel{head}").from_pretrained(store.folder(case))
        assert type(model) is model_class(case)

    @pytest.mark.parametrize("written_prefix", [False, True])
    @pytest.mark.parametrize("name", ["masked_lm", "classifier"])
    def test_base_into_head(self, name, written_prefix, tmp_path):
        """The base's tensors arrive, exactly the head's are new, and these are a function of the seed."""
        case, base = self.cases[getattr(self, name)], self.cases[self.base]
        prefix = self.prefix if written_prefix else ""
        golden.write(base, tmp_path, change=lambda state: {prefix + key: value for key, value in state.items()})
        config = {key: case.config[key] for key in ("id2label", "label2id") if key in case.config}
        golden.write(base, tmp_path / "labels", **config)
        load = model_class(case).from_pretrained
        labels = {"num_labels": len(case.config["id2label"])} if "id2label" in case.config else {}
        model = load(tmp_path, seed=3, **labels)
        assert set(model.loading_report.new) == self.head_keys(case)
        # The pooler of a base is not part of every head's model.
        unused = {key.removeprefix(self.prefix) for key in model.loading_report.unused}
        assert unused == {key for key in base.keys if self.prefix + key not in case.keys}
        model.save_pretrained(tmp_path / "again")
        again = open_checkpoint(tmp_path / "again")
        for key in set(case.keys) - self.head_keys(case):
            bare = key.removeprefix(self.prefix)
            np.testing.assert_array_equal(again[key], golden.tensor(bare, base.keys[bare]), err_msg=key)
        assert_trees_equal(model.params, load(tmp_path, seed=3, **labels).params)
        other = flatten(load(tmp_path, seed=4, **labels).params)
        assert any(not np.array_equal(leaf, other[path]) for path, leaf in flatten(model.params).items())

    def test_head_into_base(self, store):
        base, case = self.cases[self.base], self.cases[self.masked_lm]
        model = model_class(base).from_pretrained(store.folder(case))
        assert set(model.loading_report.unused) == self.head_keys(case)
        assert set(model.loading_report.new) == {key for key in base.keys if self.prefix + key not in case.keys}
        headed = store.model(case)(case.runs["mixed"].inputs["input_ids"], output_hidden_states=True)
        states = model(case.runs["mixed"].inputs["input_ids"]).last_hidden_state
        np.testing.assert_array_equal(states, headed.hidden_states[-1])

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

    def test_wrong_shapes_are_refused_together(self, tmp_path):
        case = self.cases[self.classifier]
        query = f"{self.prefix}encoder.layer.1.attention.self.query.bias"
        head = max(name for name in self.head_keys(case) if case.keys[name][0] == 3)

        def change(state):
            return {**state, query: state[query][:-1], head: state[head][:2]}

        golden.write(case, tmp_path, change=change)
        with pytest.raises(CheckpointError) as caught:
            model_class(case).from_pretrained(tmp_path)
        text = str(caught.value)
        width = case.config["hidden_size"]
        for part in (query, head, str((width,)), str((width - 1,)), str(case.keys[head])):
            assert part in text
        model = model_class(case).from_pretrained(tmp_path, ignore_mismatched_sizes=True)
        assert {str(name).split()[0] for name in model.loading_report.mismatched} == {query, head}
        assert not model.loading_report.unused

    def test_missing_and_left_over_are_refused_together(self, tmp_path):
        case = self.cases[self.masked_lm]
        gone = [f"{self.prefix}encoder.layer.{index}.output.dense.weight" for index in (0, 1)]
        extra = f"{self.prefix}encoder.layer.2.output.dense.weight"

        def change(state):
            return {**{key: value for key, value in state.items() if key not in gone}, extra: state[gone[0]]}

        golden.write(case, tmp_path, change=change)
        with pytest.raises(CheckpointError) as caught:
            model_class(case).from_pretrained(tmp_path)
        assert all(name in str(caught.value) for name in (*gone, extra))
        # A left-over alone is refused too.
        golden.write(case, tmp_path, change=lambda state: {**state, extra: state[gone[0]]})
        with pytest.raises(CheckpointError, match=extra.replace(".", r"\.")):
            model_class(case).from_pretrained(tmp_path)

    def test_params_of_another_structure_are_refused(self, store, tmp_path):
        case = self.cases[self.masked_lm]
        model = model_class(case).from_pretrained(store.folder(case))
        flat = flatten(model.params)
        path = next(iter(flat))
        with pytest.raises(DistaffError, match=path):
            model.params = {"elsewhere": 1, **{key: value for key, value in flat.items() if key != path}}
        doubled = jax.tree.map(lambda leaf: leaf * 2, model.params)
        model.params = doubled
        assert_trees_equal(model.params, doubled)

    def test_configs_that_are_not_implemented_are_refused(self, store):
        case = self.cases[self.base]
        for fields in self.refused:
            field, value = next(iter(fields.items()))
            with pytest.raises(ConfigError) as caught:
                model_class(case).from_pretrained(store.folder(case, **fields))
            assert field in str(caught.value)
            assert str(value) in str(caught.value)
