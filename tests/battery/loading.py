"""Checks of loading: base and head, prefixes, old names, and what is refused."""

import jax
import numpy as np
import pytest

import distaff
from battery.family import Common, assert_trees_equal, layers_of, model_class
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
    "ForImageClassification",
)


class LoadingChecks(Common):
    @property
    def prefix(self) -> str:
        return f"{model_class(self.cases[self.base]).base_model_prefix}."

    def head_keys(self, case: golden.Case) -> set[str]:
        return {name for name in case.keys if not name.startswith(self.prefix)}

    def test_auto_class_finds_the_class(self, case, store):
        name = case.class_name.replace("LMHeadModel", "ForCausalLM")
        head = next((head for head in AUTO_HEADS if name.endswith(head)), "")
        model = getattr(distaff, f"FlaxAutoModel{head}").from_pretrained(store.folder(case))
        assert type(model) is model_class(case)

    @pytest.mark.parametrize("written_prefix", [False, True])
    def test_base_into_head(self, lm_or_headed, written_prefix, tmp_path):
        """The base's tensors arrive, exactly the head's are new, and these are a function of the seed."""
        case, base = self.cases[lm_or_headed], self.cases[self.base]
        prefix = self.prefix if written_prefix else ""
        golden.write(base, tmp_path, change=lambda state: {prefix + key: value for key, value in state.items()})
        load = model_class(case).from_pretrained
        other_fields = {"num_labels": len(case.config["id2label"])} if "id2label" in case.config else {}
        if not case.config.get("tie_word_embeddings", True):
            other_fields["tie_word_embeddings"] = False
        model = load(tmp_path, seed=3, **other_fields)
        assert set(model.loading_report.new) == self.head_keys(case)
        # The pooler of a base is not part of every head's model.
        unused = {key.removeprefix(self.prefix) for key in model.loading_report.unused}
        assert unused == {key for key in base.keys if self.prefix + key not in case.keys}
        model.save_pretrained(tmp_path / "again")
        again = open_checkpoint(tmp_path / "again")
        for key in set(case.keys) - self.head_keys(case):
            bare = key.removeprefix(self.prefix)
            np.testing.assert_array_equal(again[key], golden.tensor(bare, base.keys[bare]), err_msg=key)
        assert_trees_equal(model.params, load(tmp_path, seed=3, **other_fields).params)
        other = flatten(load(tmp_path, seed=4, **other_fields).params)
        differs = any(not np.array_equal(leaf, other[path]) for path, leaf in flatten(model.params).items())
        assert differs == bool(self.head_keys(case))

    def test_head_into_base(self, store):
        base, case = self.cases[self.base], self.cases[self.lm]
        model = model_class(base).from_pretrained(store.folder(case))
        assert set(model.loading_report.unused) == self.head_keys(case)
        assert set(model.loading_report.new) == {key for key in base.keys if self.prefix + key not in case.keys}
        headed = store.model(case)(case.runs["mixed"].inputs["input_ids"], output_hidden_states=True)
        states = model(case.runs["mixed"].inputs["input_ids"]).last_hidden_state
        np.testing.assert_array_equal(states, headed.hidden_states[-1])

    def test_wrong_shapes_are_refused_together(self, tmp_path):
        case = self.cases[self.headed]
        query = f"{self.prefix}{self.layer_bias.format(1)}"
        head = max(self.head_keys(case))

        def change(state):
            return {**state, query: state[query][:-1], head: state[head][:2]}

        golden.write(case, tmp_path, change=change)
        with pytest.raises(CheckpointError) as caught:
            model_class(case).from_pretrained(tmp_path)
        text = str(caught.value)
        (width,) = case.keys[query]
        for part in (query, head, str((width,)), str((width - 1,))):
            assert part in text
        model = model_class(case).from_pretrained(tmp_path, ignore_mismatched_sizes=True)
        assert {str(name).split()[0] for name in model.loading_report.mismatched} == {query, head}
        assert not model.loading_report.unused

    def test_missing_and_left_over_are_refused_together(self, tmp_path):
        case = self.cases[self.lm]
        gone = [f"{self.prefix}{self.layer_weight.format(index)}" for index in (0, 1)]
        extra = f"{self.prefix}{self.layer_weight.format(layers_of(case))}"

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
        case = self.cases[self.lm]
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
