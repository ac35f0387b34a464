"""Checks of use of encoder-decoders: dropout, the module alone, refused inputs, losses."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import CLOSE, config_of, model_class, tensor_inputs
from battery.seq2seq import Seq2SeqNumbers
from distaff.core.errors import ConfigError, DistaffError
from distaff.nn.vocabulary import cross_entropy_sum


class Seq2SeqBattery(Seq2SeqNumbers):
    """Everything."""

    #: Config fields of dropout, each of which must do something to a language model.
    dropout_fields: ClassVar[tuple[str, ...]] = ()
    #: Config fields of stacks of one layer whose random weights do something.
    shallow: ClassVar[dict[str, int]] = {}
    layerdrop_fields: ClassVar[tuple[str, ...]] = ()

    def test_each_dropout_rate_is_used(self):
        case = self.cases[self.lm]
        inputs = tensor_inputs(case.runs["mixed"])
        fields = (*self.dropout_fields, *self.layerdrop_fields)
        evaluated = None
        for field in (None, *fields):
            rates = {name: 0.5 if name == field else 0.0 for name in fields}
            model = model_class(case)(config_of(case, **self.shallow, **rates))
            evaluated = model(**inputs).logits if evaluated is None else evaluated
            difference = 0.0
            # A layer that is left out with probability 1/2 is missed by one of eight keys in all but 1 of 256 runs.
            for key in range(8 if field in self.layerdrop_fields else 1):
                trained = model(**inputs, dropout_rng=jax.random.key(key), train=True).logits
                difference = max(difference, float(jnp.abs(trained - evaluated).max()))
            assert difference > 1e-4 if field else difference < 1e-6, field

    def test_dropout_follows_the_key(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        one, same, other = (
            np.asarray(model(**inputs, dropout_rng=jax.random.key(key), train=True).logits) for key in (0, 0, 1)
        )
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)

    def test_lazy_logits(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        lazy = model.run(inputs, lazy_logits=True).logits
        np.testing.assert_allclose(lazy.logits(), model(**inputs).logits, rtol=0, atol=CLOSE)

    def test_bare_module(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        arrays = {name: jnp.asarray(value) for name, value in inputs.items()}
        shapes = jax.eval_shape(model.module.init, jax.random.key(0), **arrays)["params"]
        assert jax.tree.structure(shapes) == jax.tree.structure(model.params)
        encoded = model.module.apply(
            {"params": model.params}, arrays["input_ids"], arrays["attention_mask"], method="encode"
        )
        found = model.module.apply(
            {"params": model.params},
            arrays["decoder_input_ids"],
            encoded.last_hidden_state,
            arrays["attention_mask"],
            arrays["decoder_attention_mask"],
            method="decode",
        )
        np.testing.assert_allclose(found.logits, model(**inputs).logits, rtol=0, atol=CLOSE)

    def test_outputs_are_objects_and_tuples(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        outputs = model(**inputs)
        assert list(outputs.keys()) == ["logits", "encoder_last_hidden_state"]
        np.testing.assert_array_equal(outputs[0], outputs.logits)
        plain = model(**inputs, return_dict=False)
        assert isinstance(plain, tuple)
        np.testing.assert_array_equal(plain[1], outputs.encoder_last_hidden_state)

    @pytest.mark.parametrize("name", ["input_ids", "decoder_input_ids"])
    @pytest.mark.parametrize("wrong", [40, -1, -100])
    def test_ids_outside_the_vocabulary_are_refused(self, name, wrong, store):
        case = self.cases[self.lm]
        inputs = tensor_inputs(case.runs["mixed"])
        ids = inputs[name].copy()
        ids[1, 2] = wrong
        with pytest.raises(DistaffError, match=rf"^{name}\[1, 2\] is {wrong}, and vocab_size is 40"):
            store.model(case)(**{**inputs, name: ids})

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"input_ids": np.ones(8, np.int32)}, r"^input_ids is \[8\]"),
            ({"decoder_input_ids": np.ones(6, np.int32)}, r"^decoder_input_ids is \[6\]"),
            ({"attention_mask": np.ones((3, 7), np.int32)}, r"^attention_mask is \[3, 7\]"),
            ({"decoder_attention_mask": np.ones((3, 1), np.int32)}, r"^decoder_attention_mask is \[3, 1\]"),
            ({"input_ids": np.ones((3, 8), np.float32)}, "float32"),
            ({"input_ids": np.ones((3, 0), np.int32), "attention_mask": None}, r"^input_ids is \[3, 0\], rows without"),
            ({"decoder_input_ids": np.ones((3, 0), np.int32), "decoder_attention_mask": None}, r"^decoder_input_ids"),
            ({"decoder_input_ids": np.ones((2, 6), np.int32), "decoder_attention_mask": None}, "2 rows"),
        ],
    )
    def test_wrong_inputs_are_refused(self, change, words, store):
        case = self.cases[self.lm]
        with pytest.raises(DistaffError, match=words):
            store.model(case)(**{**tensor_inputs(case.runs["mixed"]), **change})

    def test_wrong_calls_of_the_decoder_are_refused(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        ids, encoded = inputs["decoder_input_ids"], model.encode(inputs["input_ids"])
        with pytest.raises(DistaffError, match="nothing to attend to"):
            model.decode(ids)
        with pytest.raises(DistaffError, match="nothing to attend to"):
            model.decode(ids, past_key_values=model.init_cache(3, 9))
        with pytest.raises(DistaffError, match="6 more tokens do not fit the cache, which holds 0 of 5"):
            model.decode(ids, encoded, past_key_values=model.init_cache(3, 5, encoded))
        with pytest.raises(DistaffError, match="slot of the cache"):
            model.decode(ids, encoded, None, np.ones((3, 6)), past_key_values=model.init_cache(3, 9, encoded))
        with pytest.raises(DistaffError, match="encoder_attention_mask"):
            model.decode(ids, encoded, np.ones((3, 7)))
        with pytest.raises(DistaffError, match="not its states alone"):
            model.decode(ids, encoded.last_hidden_state)
        with pytest.raises(DistaffError, match="4 rows"):
            model.init_cache(4, 9, encoded)

    def test_refused_configs(self):
        case = self.cases[self.lm]
        for fields in self.refused:
            with pytest.raises(ConfigError):
                model_class(case)(config_of(case, **fields), _do_init=False)

    def test_padded_targets_do_not_change_the_loss(self, store):
        """A target of 4 tokens, padded to 4, 8 and 16, with and without label smoothing."""
        case = self.cases[self.lm]
        model, source = store.model(case), np.full((1, 5), 7, np.int32)
        smoothings, losses = (0.0, 0.1), []
        for length in (4, 8, 16):
            labels = np.full((1, length), -100, np.int32)
            labels[0, :4] = 9, 12, 6, 11
            weights = (labels != -100).astype(np.float32)
            ids = model.prepare_decoder_input_ids_from_labels(labels)
            projection = model.run({"input_ids": source, "decoder_input_ids": ids}, lazy_logits=True).logits
            safe = np.where(labels == -100, 0, labels)
            given = jnp.asarray(safe), jnp.asarray(weights)
            losses.append([cross_entropy_sum(projection, *given, label_smoothing=rate) / 4 for rate in smoothings])
            # By hand: the label's share, and the rest spread over the vocabulary.
            scores = np.asarray(jax.nn.log_softmax(projection.logits()))[0, :4]
            picked, mean = scores[np.arange(4), safe[0, :4]].mean(), scores.mean()
            hand = [-(1 - rate) * picked - rate * mean for rate in smoothings]
            np.testing.assert_allclose(losses[-1], hand, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=0, atol=1e-6)
