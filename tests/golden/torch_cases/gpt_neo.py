"""GPT-Neo."""

from torch_cases import Cases
from torch_cases._causal import inputs_of

__all__ = ["CASES", "inputs_of"]

NEO = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 4,
    "max_position_embeddings": 64,
    "resid_dropout": 0.1,
    "embed_dropout": 0.1,
    "attention_dropout": 0.1,
    "bos_token_id": 63,
    "eos_token_id": 63,
}
TINY = {"vocab_size": 32, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 20}
TINY |= {"attention_types": [[["global", "local"], 1]], "window_size": 3, "bos_token_id": 31, "eos_token_id": 31}
ODD = {"hidden_size": 24, "num_heads": 3, "intermediate_size": 40, "activation_function": "relu", "window_size": 2}
ODD |= {"layer_norm_epsilon": 1e-3, "num_layers": 3, "attention_types": [[["local"], 2], [["global"], 1]]}
ONE_LOCAL = {"num_layers": 1, "attention_types": [[["local"], 1]]}

CASES: Cases = {
    "model": ("GPTNeoModel", NEO, ("mixed", "left_positions", "empty_row", "positions", "single")),
    "model_one_layer": ("GPTNeoModel", NEO | ONE_LOCAL, ("mixed",)),
    "model_odd": ("GPTNeoModel", NEO | ODD, ("mixed",)),
    "causal_lm": ("GPTNeoForCausalLM", NEO, ("mixed", "gradient", "greedy")),
    "causal_lm_odd": ("GPTNeoForCausalLM", NEO | ODD, ("mixed",)),
    "causal_lm_untied": ("GPTNeoForCausalLM", NEO | {"tie_word_embeddings": False}, ("mixed", "gradient")),
    "causal_lm_tie_broken": ("GPTNeoForCausalLM", NEO, ("mixed",)),
    "tiny_causal_lm": ("GPTNeoForCausalLM", NEO | TINY, ("mixed",)),
}
