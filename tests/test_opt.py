"""OPT."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery import CausalBattery
from battery.family import CLOSE, config_of, model_class
from distaff.models.opt import positions_of
from distaff.nn.cache import advance


class TestOPT(CausalBattery):
    family = "opt"
    left_padding_is_free = True
    cached = ("causal_lm", "causal_lm_odd", "causal_lm_post")
    greedy = ("causal_lm", "causal_lm_post")
    words = "decoder.embed_tokens.weight"
    layer_bias, layer_weight = "decoder.layers.{}.self_attn.q_proj.bias", "decoder.layers.{}.fc2.weight"
    dropout = ("attention_dropout", "dropout")
    shallow: ClassVar = {"num_hidden_layers": 1, "init_std": 0.2}
    wide: ClassVar = {"hidden_size": 128, "ffn_dim": 256, "vocab_size": 300, "init_std": 0.03}
    huge: ClassVar = {"hidden_size": 4096, "num_attention_heads": 32, "ffn_dim": 16384, "num_hidden_layers": 24}
    refused = (
        {"activation_function": "no_such_activation"},
        {"layer_norm_elementwise_affine": False},
        {"num_attention_heads": 5},
    )

    def test_positions_come_from_the_mask(self, store):
        """Left padding: the first real token has position 0, which is row 2 of the table; padding has row 1."""
        model = store.model(self.cases["causal_lm"])
        mask = jnp.array([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
        ids = jnp.array([[1, 1, 1, 5, 9, 7], [5, 9, 7, 30, 12, 8]])
        expected = [[-1, -1, -1, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
        assert positions_of(ids, mask, None).tolist() == expected
        # Later calls find their places in the mask over the slots of the cache.
        cache = model.init_cache(2, 9)
        slots = jnp.concatenate([mask, jnp.ones((2, 3), mask.dtype)], axis=1)
        assert positions_of(ids, slots, cache).tolist() == expected
        later = advance(cache, cache.layers, 6)
        assert positions_of(ids[:, :2], slots, later).tolist() == [[3, 4], [6, 7]]
        assert positions_of(ids[:, :2], None, later).tolist() == [[6, 7], [6, 7]]
        logits = np.asarray(model(ids, attention_mask=mask).logits)
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits[0, 3:], model(ids[:1, 3:]).logits[0], rtol=0, atol=CLOSE)

    def test_old_field_without_effect(self, store):
        """activation_dropout stands in the first files; PyTorch never applied it."""
        case = self.cases["causal_lm"]
        model = model_class(case).from_pretrained(store.folder(case, activation_dropout=0.5, dropout=0.0))
        ids = case.runs["mixed"].inputs["input_ids"]
        assert model.config.activation_dropout == 0.5
        np.testing.assert_allclose(model(ids).logits, store.model(case)(ids).logits, rtol=0, atol=CLOSE)

    @pytest.mark.parametrize("scan_layers", [False, True])
    def test_layerdrop_follows_the_key(self, scan_layers):
        """With a rate of 1 no layer is left: the states are the embeddings. Between, the key decides."""
        case = self.cases["model"]
        ids = case.runs["mixed"].inputs["input_ids"]
        options = {"dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.2, "_remove_final_layer_norm": True}

        def model(rate):
            return model_class(case)(config_of(case, layerdrop=rate, **options), scan_layers=scan_layers)

        def states(model, key=None):
            train = {} if key is None else {"train": True, "dropout_rng": jax.random.key(key)}
            return np.asarray(model(ids, output_hidden_states=True, **train).hidden_states)

        halved, dropped = model(0.5), states(model(1.0), 0)
        np.testing.assert_allclose(states(halved), states(model(0.0), 0), rtol=0, atol=CLOSE)
        np.testing.assert_array_equal(dropped[0], dropped[-1])
        kept = {tuple(np.abs(np.diff(states(halved, key), axis=0)).max(axis=(1, 2, 3)) > 0) for key in range(8)}
        assert len(kept) > 1
