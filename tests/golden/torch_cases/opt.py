"""OPT."""

from torch_cases import Cases
from torch_cases._causal import inputs_of

__all__ = ["CASES", "inputs_of"]

OPT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 62,
    "attention_dropout": 0.1,
}
TINY = {"vocab_size": 32, "hidden_size": 8, "ffn_dim": 16, "num_attention_heads": 2, "max_position_embeddings": 20}
ODD = {"hidden_size": 24, "num_attention_heads": 3, "activation_function": "gelu", "enable_bias": False}
# As opt-350m.
POST = {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
ALL = ("mixed", "left_positions", "empty_row", "positions", "single")

CASES: Cases = {
    "model": ("OPTModel", OPT, ALL),
    "model_one_layer": ("OPTModel", OPT | ODD | {"num_hidden_layers": 1}, ("mixed",)),
    "model_odd": ("OPTModel", OPT | ODD | {"pad_token_id": 5}, ("mixed",)),
    "model_post": ("OPTModel", OPT | POST, ALL),
    "model_no_final_norm": ("OPTModel", OPT | {"_remove_final_layer_norm": True}, ("mixed",)),
    "causal_lm": ("OPTForCausalLM", OPT, ("mixed", "gradient", "greedy")),
    "causal_lm_odd": ("OPTForCausalLM", OPT | ODD | {"word_embed_proj_dim": 40}, ("mixed",)),
    "causal_lm_post": ("OPTForCausalLM", OPT | POST, ("mixed", "gradient", "greedy")),
    "causal_lm_untied": ("OPTForCausalLM", OPT | {"tie_word_embeddings": False}, ("mixed", "gradient")),
    "causal_lm_post_untied": ("OPTForCausalLM", OPT | POST | {"tie_word_embeddings": False}, ("mixed",)),
    "causal_lm_tie_broken": ("OPTForCausalLM", OPT | POST, ("mixed",)),
    "tiny_causal_lm": ("OPTForCausalLM", OPT | TINY, ("mixed",)),
}
