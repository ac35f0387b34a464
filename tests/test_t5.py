"""T5, mT5 and all their heads."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import CLOSE, config_of, model_class, tensor_inputs
from battery.seq2seq import in_steps
from battery.seq2seq_usage import Seq2SeqBattery
from distaff.core.errors import CheckpointError, DistaffError
from distaff.core.tree import flatten, unflatten
from distaff.models.t5 import RelativeBias, relative_buckets
from distaff.nn.mask import Sight
from distaff.nn.vocabulary import cross_entropy_sum
from golden import cases as golden


class TestT5(Seq2SeqBattery):
    family = "t5"
    base, lm, headed = "model", "lm", "encoder"
    language_models = ("lm", "lm_odd")
    shallow: ClassVar = {"num_layers": 1, "num_decoder_layers": 1}
    dropout_fields = ("dropout_rate",)
    refused = ({"dense_act_fn": "no_such_activation"}, {"is_decoder": True})

    def test_left_padding_changes_nothing(self, store):
        """Distances are all that T5 knows: rows padded on the left need no positions."""
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        real, target = (inputs[name][2].astype(bool) for name in ("attention_mask", "decoder_attention_mask"))
        padded = model(**inputs).logits[2][target]
        alone = model(inputs["input_ids"][2:, real], decoder_input_ids=inputs["decoder_input_ids"][2:, target]).logits
        np.testing.assert_allclose(padded, alone[0], rtol=0, atol=CLOSE)

    def test_sixty_tokens_step_by_step(self, store):
        """Beyond the buckets, and as PyTorch decodes them at once."""
        for name in ("lm", "lm_odd"):
            run = self.cases[name].runs["long"]
            inputs = tensor_inputs(run) | {"decoder_attention_mask": np.ones((1, 60), np.int32)}
            found = in_steps(store.model(self.cases[name]), inputs, (1,) * 20 + (40,), slots=64)
            np.testing.assert_allclose(found, run.outputs["logits"], rtol=0, atol=1e-4)

    def test_logits_are_scaled_where_the_config_says(self, store):
        """By d_model ** -0.5, in T5 and not in its version 1.1."""
        case = self.cases["lm"]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        unscaled = model_class(case).from_pretrained(store.folder(case, scale_decoder_outputs=False))
        logits = np.asarray(model(**inputs).logits)
        np.testing.assert_allclose(logits * 24**0.5, unscaled(**inputs).logits, rtol=1e-4, atol=1e-4)
        # Transformers 4 wrote it as an untied head.
        old = config_of(case, tie_word_embeddings=False)
        assert old.scale_decoder_outputs is case.config["scale_decoder_outputs"] is True
        fields = {key: value for key, value in case.config.items() if key != "scale_decoder_outputs"}
        fresh = type(old)(**{**fields, "tie_word_embeddings": False})
        assert fresh.scale_decoder_outputs is False

    def test_the_decoder_needs_its_tokens(self, store):
        model = store.model(self.cases["lm"])
        with pytest.raises(DistaffError, match="prepare_decoder_input_ids_from_labels"):
            model(np.full((1, 4), 7))
        labels = np.array([[4, 5, 1, 0, -100]])
        np.testing.assert_array_equal(model.prepare_decoder_input_ids_from_labels(labels), [[0, 4, 5, 1, 0]])
        case = self.cases["mt5_lm"]
        lacking = model_class(case)(config_of(case, decoder_start_token_id=None), _do_init=False)
        np.testing.assert_array_equal(lacking.prepare_decoder_input_ids_from_labels(labels), [[0, 4, 5, 1, 0]])

    def test_positions_are_refused(self, store):
        model, ids = store.model(self.cases["lm"]), np.full((1, 4), 7)
        with pytest.raises(DistaffError, match="leave decoder_position_ids out"):
            model(ids, decoder_input_ids=ids, decoder_position_ids=ids)
        with pytest.raises(DistaffError, match="no positions"):
            model.module.apply({"params": model.params}, jnp.asarray(ids), None, jnp.asarray(ids), method="encode")

    def test_encoder_of_a_whole_checkpoint(self, store):
        """The decoder is left where it is, without a word; a base model has a place for everything."""
        encoder, whole = self.cases["encoder"], self.cases["lm"]
        model = model_class(encoder).from_pretrained(store.folder(whole))
        assert not model.loading_report.unused
        inputs = tensor_inputs(whole.runs["mixed"])
        expected = store.model(whole).encode(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        found = model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)
        with pytest.raises(CheckpointError, match="missing"):
            model_class(self.cases["model"]).from_pretrained(store.folder(encoder))

    def test_an_old_bias_of_cross_attention_is_ignored(self, tmp_path):
        case = self.cases["lm"]
        name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        folder = golden.write(case, tmp_path, change=lambda state: {**state, name: np.zeros((32, 4), np.float32)})
        assert not model_class(case).from_pretrained(folder).loading_report.unused

    def test_random_weights(self):
        """As PyTorch's: normal, each with the deviation of its place, norms at initializer_factor."""
        case, factor = self.cases["lm_v11"], 0.7
        sizes = {"d_model": 96, "d_kv": 32, "d_ff": 200, "num_heads": 6, "vocab_size": 300}
        model = model_class(case)(config_of(case, initializer_factor=factor, **sizes))
        for path, leaf in flatten(model.params).items():
            if path.endswith("scale"):
                np.testing.assert_array_equal(leaf, np.float32(factor), err_msg=path)
                continue
            deviations = {
                "shared": 1.0,
                "query": (96 * 32) ** -0.5,
                "out": (6 * 32) ** -0.5,
                "down": 200**-0.5,
            }
            wanted = factor * next((value for key, value in deviations.items() if key in path.split("/")), 96**-0.5)
            assert abs(np.asarray(leaf).std() / wanted - 1) < 4 / np.sqrt(2 * leaf.size), path
        assert not any(decays for path, decays in flatten(model.decay_mask()).items() if path.endswith("scale"))

    def test_low_precision_with_large_weights(self, store):
        """Feed-forward weights 200 times as large: bfloat16 stays finite and learns, float16 is refused."""
        case = self.cases["lm_v11"]
        model = store.model(case, dtype=jnp.bfloat16)
        flat = {path: leaf * 200 if "/mlp/" in path else leaf for path, leaf in flatten(model.params).items()}
        inputs, labels = tensor_inputs(case.runs["gradient"]), case.runs["gradient"].inputs["labels"]
        weights = jnp.asarray(labels >= 0, jnp.float32)

        def loss_fn(params):
            logits = model.module.apply({"params": params}, **inputs, lazy_logits=True).logits
            return cross_entropy_sum(logits, jnp.maximum(labels, 0), weights) / weights.sum()

        @jax.jit
        def step(params):
            loss, gradients = jax.value_and_grad(loss_fn)(params)
            return jax.tree.map(lambda leaf, gradient: leaf - 0.02 * jnp.sign(gradient), params, gradients), loss

        params, losses = unflatten(flat), []
        for _ in range(20):
            params, loss = step(params)
            losses.append(float(loss))
        assert np.isfinite(losses).all()
        assert losses[-1] < 0.9 * losses[0], losses
        with pytest.raises(DistaffError, match="float16"):
            model_class(case)(config_of(case), dtype=jnp.float16)


def test_buckets_of_the_first_row():
    """Ten tokens, seen from the first: each later key in the upper half."""
    found = relative_buckets(jnp.arange(10), bidirectional=True, num_buckets=32, max_distance=128)
    np.testing.assert_array_equal(found, [0, 17, 18, 19, 20, 21, 22, 23, 24, 24])


@pytest.mark.parametrize("name", ["32-128", "10-20", "6-40"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_pytorch(name, bidirectional):
    num_buckets, max_distance = map(int, name.split("-"))
    stored = np.load(golden.GOLDEN / "t5_buckets.npz")[f"{name}-{'both' if bidirectional else 'back'}"]
    reach = len(stored) // 2
    found = relative_buckets(
        jnp.arange(-reach, reach + 1),
        bidirectional=bidirectional,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    np.testing.assert_array_equal(found, stored)


@pytest.mark.parametrize(("queries", "keys", "start"), [(4, 4, 0), (1, 9, 5), (3, 9, 2), (1, 1, 0)])
def test_bias_is_a_lookup_for_each_pair(queries, keys, start):
    bias = RelativeBias(2, 8, 6, False, 1.0)
    params = bias.init(jax.random.key(0), queries, keys, start)
    offsets = np.arange(keys)[None] - (start + np.arange(queries))[:, None]
    buckets = relative_buckets(jnp.asarray(offsets), bidirectional=False, num_buckets=8, max_distance=6)
    expected = params["params"]["table"]["embedding"][buckets].transpose(2, 0, 1)[None]
    sight = Sight(relative=bias.apply(params, queries, keys, start), origin=queries - 1)
    np.testing.assert_array_equal(sight.bias(queries, keys), expected)
