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
    tensor_inputs,
)
from distaff.core.errors import DistaffError
from distaff.core.tree import flatten, unflatten


class UsageChecks(Common):
    def test_random_weights(self):
        case = self.cases[self.lm]
        config = config_of(case, **self.wide)
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
            deviation = 0.03 * next((factor for end, factor in self.deviations.items() if path.endswith(end)), 1.0)
            # Four standard errors of the estimates of a deviation and of a mean.
            assert abs(leaf.std() / deviation - 1) < 4 / np.sqrt(2 * leaf.size), path
            assert abs(leaf.mean()) < 4 * deviation / np.sqrt(leaf.size), path
        kernels = [leaf for leaf in normal.values() if leaf.shape == (128, 128)]
        assert not any(np.array_equal(one, other) for one, other in itertools.pairwise(kernels))
        assert_trees_equal(model.params, build(config, seed=5).params)
        other = flatten(build(config, seed=6).params)
        assert not any(np.array_equal(leaf, other[path]) for path, leaf in normal.items())
        narrow = build(config, seed=5, param_dtype=jnp.bfloat16)
        assert {leaf.dtype for leaf in jax.tree.leaves(narrow.params)} == {jnp.dtype(jnp.bfloat16)}

    def test_scanned_random_weights_equal_those_of_the_loop(self, tmp_path):
        """Which layout holds them does not change what the seed gives."""
        case = self.cases[self.lm]
        build, config = model_class(case), config_of(case)
        build(config, seed=5, scan_layers=True).save_pretrained(tmp_path)
        assert_trees_equal(build.from_pretrained(tmp_path).params, build(config, seed=5).params)

    def test_shapes_only(self):
        case = self.cases[self.lm]
        big = config_of(case, **self.huge)
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
        case = self.cases[self.lm]
        model, ids = store.model(case), jnp.asarray(case.runs["mixed"].inputs["input_ids"])
        variables = jax.eval_shape(model.module.init, jax.random.key(0), ids)
        assert jax.tree.structure(variables["params"]) == jax.tree.structure(model.params)
        found = jax.jit(model.module.apply)({"params": model.params}, ids)
        np.testing.assert_allclose(found.logits, model(ids).logits, rtol=0, atol=CLOSE)

    def test_init_weights_keeps_what_is_given(self, store):
        case = self.cases[self.lm]
        model = store.model(case)
        flat = flatten(model.params)
        path = next(path for path in flat if path.endswith("kernel"))
        kept = unflatten({name: leaf for name, leaf in flat.items() if name != path})
        filled = flatten(model.init_weights(jax.random.key(1), (1, 8), params=kept))
        assert filled.keys() == flat.keys()
        assert not np.array_equal(filled[path], flat[path])
        assert all(np.array_equal(filled[name], flat[name]) for name in flat if name != path)

    def test_dropout_follows_the_key(self):
        case = self.cases[self.headed]
        model, inputs = self.one_layer(case), tensor_inputs(case.runs["mixed"])
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

    def test_each_dropout_rate_is_used(self, dropout_field):
        case = self.cases[self.headed]
        rates = {name: 0.5 if name == dropout_field else 0.0 for name in self.dropout}
        model, inputs = self.one_layer(case, config=rates), tensor_inputs(case.runs["mixed"])
        trained = model(**inputs, dropout_rng=jax.random.key(0), train=True).logits
        difference = float(jnp.abs(trained - model(**inputs).logits).max())
        assert difference > 1e-3 if dropout_field else difference < CLOSE

    @pytest.mark.parametrize("scan_layers", [False, True])
    def test_each_layer_draws_its_own_dropout(self, scan_layers, store):
        case = self.cases[self.base]
        model, ids = store.model(case, scan_layers=scan_layers), case.runs["mixed"].inputs["input_ids"]
        outputs = model(ids, dropout_rng=jax.random.key(0), train=True, output_attentions=True)
        # What may be attended and has no weight was dropped.
        seen = [np.asarray(weights) > 0 for weights in model(ids, output_attentions=True).attentions]
        shown = seen[0] & seen[1]
        first, second = ((np.asarray(weights) == 0)[shown] for weights in outputs.attentions[:2])
        rate = case.config[self.dropout[0]]
        for dropped in (first, second):
            assert abs(dropped.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / dropped.size)
        assert not np.array_equal(first, second)

    def test_config_asks_for_states(self, store):
        case = self.cases[self.base]
        model = model_class(case).from_pretrained(store.folder(case, output_hidden_states=True))
        ids = case.runs["mixed"].inputs["input_ids"]
        assert model(ids).hidden_states is not None
        assert model(ids, output_hidden_states=False).hidden_states is None

    @pytest.mark.parametrize("wrong", [64, -1, -100])
    def test_ids_outside_the_vocabulary_are_refused(self, wrong, store):
        case = self.cases[self.lm]
        ids = case.runs["mixed"].inputs["input_ids"].copy()
        ids[1, 2] = wrong
        with pytest.raises(DistaffError) as caught:
            store.model(case)(ids)
        assert str(wrong) in str(caught.value)
        assert "64" in str(caught.value)
        assert "[1, 2]" in str(caught.value) or "(1, 2)" in str(caught.value)

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
        case = self.cases[self.headed]
        model = self.one_layer(case)
        inputs, labels = tensor_inputs(case.runs["gradient"]), case.runs["gradient"].inputs["labels"]

        def loss(params, inputs, labels):
            return cross_entropy(model(**inputs, params=params, train=False).logits, labels)

        def one(params, inputs, label):
            return loss(params, {name: value[None] for name, value in inputs.items()}, label[None])

        whole = jax.jit(jax.grad(loss))(model.params, inputs, labels)
        each = jax.jit(jax.vmap(jax.grad(one), in_axes=(None, 0, 0)))(model.params, inputs, labels)
        assert_trees_equal(whole, jax.tree.map(lambda leaf: leaf.mean(0), each), atol=CLOSE)
