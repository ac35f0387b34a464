"""GPT-Neo."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from battery import CausalBattery
from battery.family import CLOSE, model_class
from golden import cases as golden


class TestGPTNeo(CausalBattery):
    family = "gpt_neo"
    cached = ("causal_lm", "causal_lm_odd")
    words, buffers = "wte.weight", ("h.{}.attn.attention.bias", "h.{}.attn.attention.masked_bias")
    layer_bias, layer_weight = "h.{}.mlp.c_fc.bias", "h.{}.mlp.c_proj.weight"
    dropout = ("attention_dropout", "resid_dropout", "embed_dropout")
    shallow: ClassVar = {"num_layers": 1, "attention_layers": ["local"], "initializer_range": 0.2}
    wide: ClassVar = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 300, "initializer_range": 0.03}
    huge: ClassVar = {
        "hidden_size": 4096,
        "num_heads": 32,
        "num_layers": 24,
        "attention_layers": ["global", "local"] * 12,
    }
    refused = (
        {"activation_function": "no_such_activation"},
        {"num_heads": 5},
        {"attention_layers": ["global", "sparse"] * 2},
    )

    def test_window_holds_over_the_slots_of_a_cache(self, store):
        """One local layer of window 4: a token further back than that changes nothing, with a cache or without."""
        model = store.model(self.cases["model_one_layer"])
        ids = np.array([[5, 9, 7, 30, 12, 8, 41, 6, 17, 22]], np.int32)
        other = ids.copy()
        other[0, 3] = 33

        def last(ids):
            cache = model(ids[:, :7], past_key_values=model.init_cache(1, 16)).past_key_values
            return np.asarray(model(ids[:, 7:], past_key_values=cache).last_hidden_state)

        one, changed = last(ids), last(other)
        np.testing.assert_allclose(one, model(ids).last_hidden_state[:, 7:], rtol=0, atol=CLOSE)
        np.testing.assert_array_equal(one, changed)  # positions 7, 8 and 9 see 4 to 9
        inside = ids.copy()
        inside[0, 6] = 33
        assert (np.abs(last(inside) - one).max(-1) > 1e-3).tolist() == [[True, True, True]]

    def test_scores_do_not_overflow_float16(self, tmp_path):
        """Scores are not scaled: with queries and keys of 256 and 8 numbers a head they are 524,288."""
        case = self.cases["model_one_layer"]

        def large(state):
            for name, value in state.items():
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    value[:] = 8.0
                elif "ln_1" in name:  # a norm that gives ones
                    value[:] = name.endswith("bias")
            return state

        ids = case.runs["mixed"].inputs["input_ids"]
        model = model_class(case).from_pretrained(golden.write(case, tmp_path, change=large), dtype=jnp.float16)
        assert np.isfinite(np.asarray(model(ids).last_hidden_state, np.float32)).all()
