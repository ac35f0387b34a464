"""GPT-2."""

from torch_cases import Cases
from torch_cases._causal import inputs_of

__all__ = ["CASES", "inputs_of"]

GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 63}
GPT2 |= {"eos_token_id": 63}
TINY = {"vocab_size": 32, "n_embd": 8, "n_head": 2, "n_positions": 20, "bos_token_id": 31, "eos_token_id": 31}
ODD = {"n_embd": 24, "n_head": 3, "n_inner": 40, "activation_function": "relu", "layer_norm_epsilon": 1e-3}
INVERSE = {"scale_attn_by_inverse_layer_idx": True}
UNSCALED = {"scale_attn_weights": False}

CASES: Cases = {
    "model": ("GPT2Model", GPT2, ("mixed", "left_positions", "empty_row", "positions", "single")),
    "model_one_layer": ("GPT2Model", GPT2 | ODD | {"n_layer": 1}, ("mixed",)),
    "model_odd": ("GPT2Model", GPT2 | ODD | INVERSE, ("mixed",)),
    "causal_lm": ("GPT2LMHeadModel", GPT2, ("mixed", "gradient", "greedy")),
    "causal_lm_odd": ("GPT2LMHeadModel", GPT2 | ODD | {"reorder_and_upcast_attn": True}, ("mixed",)),
    "causal_lm_inverse": ("GPT2LMHeadModel", GPT2 | INVERSE, ("mixed", "gradient")),
    "causal_lm_unscaled": ("GPT2LMHeadModel", GPT2 | UNSCALED, ("mixed",)),
    "causal_lm_unscaled_inverse": ("GPT2LMHeadModel", GPT2 | UNSCALED | INVERSE, ("mixed",)),
    "causal_lm_untied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False}, ("mixed", "gradient")),
    "causal_lm_tie_broken": ("GPT2LMHeadModel", GPT2, ("mixed",)),
    "tiny_causal_lm": ("GPT2LMHeadModel", GPT2 | TINY, ("mixed",)),
}
