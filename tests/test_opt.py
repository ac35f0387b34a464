"""OPT."""

from battery import CausalBattery


class TestOPT(CausalBattery):
    family = "opt"
    left_padding_is_free = True
    cached = ("causal_lm", "causal_lm_odd", "causal_lm_post")
    greedy = ("causal_lm", "causal_lm_post")
    words = "decoder.embed_tokens.weight"
    layer_bias, layer_weight = "decoder.layers.{}.self_attn.q_proj.bias", "decoder.layers.{}.fc2.weight"
    dropout = ("attention_dropout", "dropout")
    shallow = {"num_hidden_layers": 1, "init_std": 0.2}  # noqa: RUF012
    wide = {"hidden_size": 128, "ffn_dim": 256, "vocab_size": 300, "init_std": 0.03}  # noqa: RUF012
    huge = {"hidden_size": 4096, "num_attention_heads": 32, "ffn_dim": 16384, "num_hidden_layers": 24}  # noqa: RUF012
    refused = (
        {"activation_function": "no_such_activation"},
        {"layer_norm_elementwise_affine": False},
        {"num_attention_heads": 5},
    )
