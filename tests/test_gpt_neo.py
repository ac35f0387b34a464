"""GPT-Neo."""

from battery import CausalBattery


class TestGPTNeo(CausalBattery):
    family = "gpt_neo"
    cached = ("causal_lm", "causal_lm_odd")
    words, buffers = "wte.weight", ("h.{}.attn.attention.bias", "h.{}.attn.attention.masked_bias")
    layer_bias, layer_weight = "h.{}.mlp.c_fc.bias", "h.{}.mlp.c_proj.weight"
    dropout = ("attention_dropout", "resid_dropout", "embed_dropout")
    shallow = {"num_layers": 1, "attention_types": [[["local"], 1]], "initializer_range": 0.2}  # noqa: RUF012
    wide = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 300, "initializer_range": 0.03}  # noqa: RUF012
    huge = {  # noqa: RUF012
        "hidden_size": 4096,
        "num_heads": 32,
        "num_layers": 24,
        "attention_types": [[["global", "local"], 12]],
    }
    refused = (
        {"activation_function": "no_such_activation"},
        {"num_heads": 5},
        {"num_layers": 5},
        {"attention_types": [[["global", "sparse"], 2]]},
    )
