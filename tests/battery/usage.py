"""Checks of use: random weights, dropout, output objects, refused ids, and jax's transformations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import (
    CLOSE,
    Common,
    assert_trees_equal,
    config_of,
    cross_entropy,
    model_class,
    one_layer,
    tensor_inputs,
)
from distaff.core.errors import DistaffError
from distaff.core.tree import flatten, unflatten

DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")


class UsageChecks(Common):
    def test_random_weights(self):
        case = self.cases[self.masked_lm]
        config = config_of(case, hidden_size=128, intermediate_size=256, vocab_size=300, initializer_range=0.03)
        build = model_class(case)
        model = build(config, seed=5)
        normal = {}
        for path, leaf in flatten(model.params).items():
            assert leaf.dtype == jnp.float32
            if path.endswith("scale"):
                np.testing.assert_array_equal(leaf, 1.0, err_msg=path)
            elif path.endswith("bias"):
                np.testing.assert_array_equal(leaf, 0.0, err_msg=path)
            else:
                normal[path] = np.asarray(leaf)
        for path, leaf in normal.items():
            # Four standard errors of the estimates of a deviation and of a mean.
            assert abs(leaf.std() / 0.03 - 1) < 4 / np.sqrt(2 * leaf.size), path
            assert abs(leaf.mean()) < 4 * 0.03 / np.sqrt(leaf.size), path
        kernels = [leaf for leaf in normal.values() if leaf.shape == (128, 128)]
        assert not any(np.array_equal(one, other) for one, other in itertools.pairwise(kernels))
        assert_trees_equal(model.params, build(config, seed=5).params)
        other = flatten(build(config, seed=6).params)
        assert not any(np.array_equal(leaf, other[path]) for path, leaf in normal.items())
        narrow = build(config, seed=5, param_dtype=jnp.bfloat16)
        assert {leaf.dtype for leaf in jax.tree.leaves(narrow.params)} == {jnp.dtype(jnp.bfloat16)}

    def test_scanned_random_weights_equal_those_of_the_loop(self, tmp_path):
        """Which layout holds them does not change what the seed gives."""
        case = self.cases[self.masked_lm]
        build, config = model_class(case), config_of(case)
        build(config, seed=5, scan_layers=True).save_pretrained(tmp_path)
        assert_trees_equal(build.from_pretrained(tmp_path).params, build(config, seed=5).params)

    def test_shapes_only(self):
        case = self.cases[self.masked_lm]
        big = config_of(case, hidden_size=4096, num_attention_heads=32, intermediate_size=16384, num_hidden_layers=24)
        model = model_class(case)(big, _do_init=False)
        shapes = jax.tree.leaves(model.params_shape_tree)
        assert sum(int(np.prod(leaf.shape)) for leaf in shapes) > 4e9
        with pytest.raises(DistaffError, match="_do_init"):
            _ = model.params
        small = config_of(case)
        without = model_class(case)(small, _do_init=False)
        params = without.init_weights(jax.random.key(0), (1, 8))
        expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), without.params_shape_tree)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == expected
        ids = case.runs["mixed"].inputs["input_ids"]
        assert without(ids, params=params).logits.shape == (*ids.shape, small.vocab_size)

    def test_bare_module(self, store):
        case = self.cases[self.masked_lm]
        model, ids = store.model(case), jnp.asarray(case.runs["mixed"].inputs["input_ids"])
        variables = jax.eval_shape(model.module.init, jax.random.key(0), ids)
        assert jax.tree.structure(variables["params"]) == jax.tree.structure(model.params)
        found = jax.jit(model.module.apply)({"params": model.params}, ids)
        np.testing.assert_allclose(found.logits, model(ids).logits, rtol=0, atol=CLOSE)

    def test_init_weights_keeps_what_is_given(self, store):
        case = self.cases[self.masked_lm]
        model = store.model(case)
        flat = flatten(model.params)
        path = next(path for path in flat if path.endswith("kernel"))
        kept = unflatten({name: leaf for name, leaf in flat.items() if name != path})
        filled = flatten(model.init_weights(jax.random.key(1), (1, 8), params=kept))
        assert filled.keys() == flat.keys()
        assert not np.array_equal(filled[path], flat[path])
        assert all(np.array_equal(filled[name], flat[name]) for name in flat if name != path)

    def test_dropout_follows_the_key(self):
        case = self.cases[self.classifier]
        model, inputs = one_layer(case), tensor_inputs(case.runs["mixed"])
        keys = jax.random.key(0), jax.random.key(1)
        one, same, other = (
            np.asarray(model(**inputs, dropout_rng=key, train=True).logits) for key in (keys[0], keys[0], keys[1])
        )
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)
        evaluated = np.asarray(model(**inputs).logits)
        np.testing.assert_array_equal(evaluated, model(**inputs).logits)
        # A key without training changes nothing.
        np.testing.assert_array_equal(evaluated, model(**inputs, dropout_rng=keys[0]).logits)
        old_style = jax.random.PRNGKey(0)
        assert np.isfinite(np.asarray(model(**inputs, dropout_rng=old_style, train=True).logits)).all()
        with pytest.raises(DistaffError, match="dropout_rng"):
            model(**inputs, train=True)

    @pytest.mark.parametrize("field", [None, *DROPOUT])
    def test_each_dropout_rate_is_used(self, field):
        case = self.cases[self.classifier]
        rates = {name: 0.5 if name == field else 0.0 for name in DROPOUT}
        model, inputs = one_layer(case, config=rates), tensor_inputs(case.runs["mixed"])
        trained = model(**inputs, dropout_rng=jax.random.key(0), train=True).logits
        difference = float(jnp.abs(trained - model(**inputs).logits).max())
        assert difference > 1e-3 if field else difference < CLOSE

    @pytest.mark.parametrize("scan_layers", [False, True])
    def test_each_layer_draws_its_own_dropout(self, scan_layers, store):
        case = self.cases[self.base]
        model, ids = store.model(case, scan_layers=scan_layers), case.runs["mixed"].inputs["input_ids"]
        outputs = model(ids, dropout_rng=jax.random.key(0), train=True, output_attentions=True)
        first, second = (np.asarray(weights) == 0 for weights in outputs.attentions)
        rate = case.config["attention_probs_dropout_prob"]
        for dropped in (first, second):
            assert abs(dropped.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / dropped.size)
        assert not np.array_equal(first, second)

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
        layers = case.config["num_hidden_layers"]
        assert (len(full.hidden_states), len(full.attentions)) == (layers + 1, layers)
        np.testing.assert_array_equal(full.hidden_states[-1], full.last_hidden_state)
        for weights in full.attentions:
            np.testing.assert_allclose(weights.sum(-1), np.ones(weights.shape[:-1]), rtol=0, atol=CLOSE)

    def test_config_asks_for_states(self, store):
        case = self.cases[self.base]
        model = model_class(case).from_pretrained(store.folder(case, output_hidden_states=True))
        ids = case.runs["mixed"].inputs["input_ids"]
        assert model(ids).hidden_states is not None
        assert model(ids, output_hidden_states=False).hidden_states is None

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

    @pytest.mark.parametrize("wrong", [64, -1, -100])
    def test_ids_outside_the_vocabulary_are_refused(self, wrong, store):
        case = self.cases[self.masked_lm]
        ids = case.runs["mixed"].inputs["input_ids"].copy()
        ids[1, 2] = wrong
        with pytest.raises(DistaffError) as caught:
            store.model(case)(ids)
        assert str(wrong) in str(caught.value)
        assert "64" in str(caught.value)
        assert "[1, 2]" in str(caught.value) or "(1, 2)" in str(caught.value)

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

    def test_inputs_of_a_tokenizer(self, store):
        """int64 from numpy, lists and a missing mask are what users pass."""
        case = self.cases[self.base]
        model, ids = store.model(case), case.runs["mixed"].inputs["input_ids"]
        plain = model(ids).last_hidden_state
        np.testing.assert_array_equal(plain, model(ids.astype(np.int64)).last_hidden_state)
        np.testing.assert_array_equal(plain, model(ids.tolist()).last_hidden_state)
        np.testing.assert_array_equal(
            plain, model(jnp.asarray(ids), attention_mask=np.ones_like(ids)).last_hidden_state
        )

    def test_jit_grad_and_vmap(self):
        """Per-example gradients add up to the gradient of the sum."""
        case = self.cases[self.classifier]
        model = one_layer(case)
        inputs, labels = tensor_inputs(case.runs["gradient"]), case.runs["gradient"].inputs["labels"]

        def loss(params, inputs, labels):
            return cross_entropy(model(**inputs, params=params, train=False).logits, labels)

        def one(params, inputs, label):
            return loss(params, {name: value[None] for name, value in inputs.items()}, label[None])

        whole = jax.jit(jax.grad(loss))(model.params, inputs, labels)
        each = jax.jit(jax.vmap(jax.grad(one), in_axes=(None, 0, 0)))(model.params, inputs, labels)
        assert_trees_equal(whole, jax.tree.map(lambda leaf: leaf.mean(0), each), atol=CLOSE)
