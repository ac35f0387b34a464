"""T5 and mT5."""

from torch_cases import Cases
from torch_cases.bart import inputs_of

__all__ = ["CASES", "inputs_of"]

T5 = {
    "vocab_size": 40,
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
V11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Transformers 5.24 fails on stacks of different depth unless it is told not to cache.
ODD = {
    "num_layers": 1,
    "use_cache": False,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-silu",
    "layer_norm_epsilon": 1e-3,
    "pad_token_id": 3,
}
TINY = {"vocab_size": 24, "d_model": 8, "d_kv": 3, "d_ff": 16, "num_heads": 2}

CASES: Cases = {
    "model": ("T5Model", T5, ("mixed", "empty_row", "single")),
    "model_odd": ("T5Model", T5 | ODD, ("mixed",)),
    "encoder": ("T5EncoderModel", T5, ("mixed", "single")),
    "lm": ("T5ForConditionalGeneration", T5, ("mixed", "gradient", "long")),
    "lm_odd": ("T5ForConditionalGeneration", T5 | ODD, ("mixed", "long")),
    "lm_tie_broken": ("T5ForConditionalGeneration", T5, ("mixed",)),
    "lm_v11": ("T5ForConditionalGeneration", T5 | V11, ("mixed", "gradient")),
    "lm_v11_tie_broken": ("T5ForConditionalGeneration", T5 | V11, ("mixed",)),
    "mt5_model": ("MT5Model", T5, ("mixed",)),
    "mt5_encoder": ("MT5EncoderModel", T5, ("mixed",)),
    "mt5_lm": ("MT5ForConditionalGeneration", T5, ("mixed",)),
    "mt5_lm_tie_broken": ("MT5ForConditionalGeneration", T5, ("mixed",)),
    "tiny_lm": ("T5ForConditionalGeneration", T5 | TINY, ("mixed",)),
    "tiny_lm_v11_tie_broken": ("T5ForConditionalGeneration", T5 | TINY | V11, ("mixed",)),
}
