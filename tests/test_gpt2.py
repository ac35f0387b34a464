"""GPT-2."""

from typing import ClassVar

from battery import CausalBattery


class TestGPT2(CausalBattery):
    family = "gpt2"
    cached = ("causal_lm", "causal_lm_odd", "causal_lm_unscaled_inverse")
    words, buffers = "wte.weight", ("h.{}.attn.bias", "h.{}.attn.masked_bias")
    layer_bias, layer_weight = "h.{}.attn.c_attn.bias", "h.{}.mlp.c_proj.weight"
    dropout = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
    shallow: ClassVar = {"n_layer": 1, "initializer_range": 0.2}
    wide: ClassVar = {"n_embd": 128, "n_inner": 256, "vocab_size": 300, "initializer_range": 0.03}
    huge: ClassVar = {"n_embd": 4096, "n_head": 32, "n_layer": 24}
    # Into the residual stream: 1 / sqrt(2 * layers).
    deviations: ClassVar = {"attention/out/kernel": 0.5, "mlp/down/kernel": 0.5}
    refused = (
        {"activation_function": "no_such_activation"},
        {"add_cross_attention": True},
        {"n_head": 5},
    )
