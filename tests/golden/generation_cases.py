"""Cases of `generate`, and what PyTorch answered: models, prompts and options here, answers in `generation.json`.

Weights are a function of name and shape, as in `cases.py`, and larger, so that the likeliest tokens are far apart.
"""

import itertools
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FILE = Path(__file__).with_suffix(".json").with_name("generation.json")
PAD = 62

BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 64,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
OPT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
# By name, which begins with the model type: PyTorch's class and fields of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 63,
            "eos_token_id": 63,
        },
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 4,
            "window_size": 4,
            "max_position_embeddings": 64,
            "bos_token_id": 63,
            "eos_token_id": 63,
        },
    ),
    "opt": ("OPTForCausalLM", OPT),
    "opt:post": ("OPTForCausalLM", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "bart": ("BartForConditionalGeneration", BART | {"decoder_start_token_id": 2, "forced_eos_token_id": None}),
    "mbart": ("MBartForConditionalGeneration", BART | {"decoder_start_token_id": 2, "scale_embedding": True}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5:gated": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
# Enough of them that sequences of many lengths compete.
ENDS = list(range(3, 60, 5))
BEAM = {"num_beams": 4, "max_new_tokens": 12}
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 10},
    "default_length": {},
    "max_length": {"max_length": 20},
    "several_ends": {"max_new_tokens": 16, "eos_token_id": ENDS},
    "min_new_tokens": {"max_new_tokens": 16, "eos_token_id": ENDS, "min_new_tokens": 5},
    "min_length": {"max_length": 30, "eos_token_id": ENDS, "min_length": 17},
    "repetition": {"max_new_tokens": 14, "repetition_penalty": 1.8},
    "bigrams": {"max_new_tokens": 20, "no_repeat_ngram_size": 2},
    "no_bigrams_off": {"max_new_tokens": 20, "no_repeat_ngram_size": 0},
    "trigrams": {"max_new_tokens": 20, "no_repeat_ngram_size": 3},
    "bad_words": {"max_new_tokens": 14, "bad_words_ids": [[57], [43, 43], [31, 31, 31], [12, 12], [55, 55, 55]]},
    "suppress": {"max_new_tokens": 10, "suppress_tokens": [31, 55, 43]},
    "begin_suppress": {"max_new_tokens": 10, "begin_suppress_tokens": [57, 31, 12, 14]},
    "forced_end": {"max_new_tokens": 8, "forced_eos_token_id": 63},
    "forced_ends": {"max_new_tokens": 8, "forced_eos_token_id": [5, 63]},
    "decay": {"max_new_tokens": 20, "exponential_decay_length_penalty": (4, 1.7)},
    "invalid": {"max_new_tokens": 6, "remove_invalid_values": True},
    "renormalized": {"max_new_tokens": 6, "renormalize_logits": True},
    "together": {
        "max_new_tokens": 18,
        "eos_token_id": ENDS,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[57], [43, 43]],
        "min_new_tokens": 7,
        "suppress_tokens": [14],
        "forced_eos_token_id": 63,
    },
}
BEAMS: dict[str, dict[str, Any]] = {
    **{
        f"beams_{penalty}_{early}": {**BEAM, "eos_token_id": ENDS, "length_penalty": penalty, "early_stopping": early}
        for penalty in (-1.0, 0.0, 0.6, 2.0)
        for early in (False, True, "never")
    },
    "beams_one_end": {**BEAM},
    "beams_several": {**BEAM, "eos_token_id": ENDS, "num_return_sequences": 3},
    "beams_max_length": {"num_beams": 3, "max_length": 18},
    "beams_min": {**BEAM, "eos_token_id": ENDS, "min_new_tokens": 6},
    "beams_bigrams": {**BEAM, "no_repeat_ngram_size": 2},
    "beams_repetition": {**BEAM, "repetition_penalty": 1.5, "eos_token_id": ENDS},
    "beams_bad_words": {**BEAM, "bad_words_ids": [[57], [43, 43], [31, 31, 31], [55, 55]]},
    "beams_forced_end": {**BEAM, "forced_eos_token_id": 63},
    "beams_decay": {**BEAM, "exponential_decay_length_penalty": (3, 1.4)},
}
LANGUAGE = {"forced_bos_token_id": 40}
SOURCE: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 10},
    "default_length": {},
    "max_length": {"max_length": 14},
    "several_ends": {"max_new_tokens": 16, "eos_token_id": ENDS},
    "min_length": {"max_length": 16, "eos_token_id": ENDS, "min_length": 7},
    "bigrams": {"max_new_tokens": 16, "no_repeat_ngram_size": 2},
    "language": {"max_new_tokens": 10, **LANGUAGE},
    "language_begin": {"max_new_tokens": 10, **LANGUAGE, "begin_suppress_tokens": [3, 29, 31, 43]},
    "forced_end": {"max_new_tokens": 8, "forced_eos_token_id": 2},
    "repetition": {"max_new_tokens": 14, "repetition_penalty": 1.8},
    **{
        f"beams_{penalty}_{early}": {**BEAM, "eos_token_id": ENDS, "length_penalty": penalty, "early_stopping": early}
        for penalty in (-1.0, 0.0, 0.6, 2.0)
        for early in (False, True, "never")
    },
    "beams_plain": {**BEAM},
    "beams_min": {**BEAM, "eos_token_id": ENDS, "min_length": 6},
    "beams_forced_end": {**BEAM, "forced_eos_token_id": 2},
    "beams_language": {**BEAM, **LANGUAGE},
    "beams_bigrams": {**BEAM, "no_repeat_ngram_size": 2, "num_return_sequences": 2},
}
# Whose pad token is likely enough to matter, where PyTorch takes padding for used tokens.
ALONE = ("gpt_neo", "opt", "opt:post")
DECODERS = ("gpt2", "gpt_neo", "opt", "opt:post")
# What every family is asked beside one at a time: options that meet.
MANY = {"max_new_tokens": 16, "eos_token_id": ENDS, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3}
EVERY: dict[str, dict[str, Any]] = {
    "greedy_together": {**MANY, "min_new_tokens": 5, "forced_eos_token_id": 3},
    "beams_plain": {**BEAM},
    "beams_several": {**BEAM, "eos_token_id": ENDS, "num_return_sequences": 4, "length_penalty": 0.6},
    "beams_together": {**MANY, "num_beams": 4, "num_return_sequences": 3, "early_stopping": True, "min_new_tokens": 5},
    "beams_never": {**MANY, "num_beams": 4, "early_stopping": "never", "length_penalty": 2.0},
    "beams_forced_end": {**BEAM, "forced_eos_token_id": 3, "suppress_tokens": [7, 9]},
}
# Strings that come within tokens and across them, and end inside of one.
STRINGS = {
    "gpt2": ["aaa", "abccc", "bacb", "é"],
    "bart": ["abccabccabccab", "ccabb", "baabbaab"],
    "t5": ["bca", "é", "cb", "a b"],
}
LATER = {"gpt2": ["accb", "bcc", "bcb"], "bart": ["aab", "ccabccabc"], "t5": ["bc c", "aa c", "a a", "fa"]}
STOP: dict[str, dict[str, Any]] = {
    f"{model}-stop_{name}": options
    for model in STRINGS
    for name, options in {
        "greedy": {"max_new_tokens": 16, "stop_strings": STRINGS[model]},
        "ends": {"max_new_tokens": 16, "stop_strings": STRINGS[model][-1], "eos_token_id": ENDS},
        "beams": {**BEAM, "stop_strings": LATER[model], "num_return_sequences": 2},
        "beams_long": {**BEAM, "stop_strings": STRINGS[model], "length_penalty": 2.0},
        "beams_early": {**BEAM, "stop_strings": STRINGS[model], "early_stopping": True, "num_return_sequences": 4},
        "beams_ends": {**BEAM, "stop_strings": LATER[model], "eos_token_id": ENDS, "num_return_sequences": 3},
    }.items()
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"gpt2-{name}": ("gpt2", options) for name, options in {**GREEDY, **BEAMS}.items()},
    **{f"{model}-{name}": (model, options) for model in ("bart", "t5") for name, options in SOURCE.items()},
    **{f"mbart-{name}": ("mbart", options) for name, options in SOURCE.items() if "language" in name},
    **{
        f"{model}-{name}": (model, options)
        for model in ("gpt_neo", "opt", "opt:post", "bart", "t5:gated")
        for name, options in EVERY.items()
        if name not in SOURCE or model != "bart"
    },
    **{f"mbart-{name}": ("mbart", {**LANGUAGE, **options}) for name, options in EVERY.items()},
    **{case: (case.partition("-")[0], options) for case, options in STOP.items()},
}
# What sampling leaves of fixed scores: name -> (Transformers' class, its arguments).
FILTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "top_k": ("TopKLogitsWarper", {"top_k": 5}),
    "top_p": ("TopPLogitsWarper", {"top_p": 0.7}),
    "top_p_tiny": ("TopPLogitsWarper", {"top_p": 1e-6}),
    "min_p": ("MinPLogitsWarper", {"min_p": 0.2}),
    "typical": ("TypicalLogitsWarper", {"mass": 0.6}),
    "epsilon": ("EpsilonLogitsWarper", {"epsilon": 0.02}),
    "eta": ("EtaLogitsWarper", {"epsilon": 0.05}),
}


def filter_scores() -> np.ndarray:
    """Return scores `[4, 64]`."""
    return (2 * np.random.default_rng(5).normal(size=(4, 64))).astype(np.float32)


def prompts(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask `[3, 12]`, of 3, 7 and 12 tokens: padded on the left, sources on the right."""
    rng, lengths = np.random.default_rng(0), (3, 7, 12)
    ids, mask = np.full((3, 12), filling(model)), np.zeros((3, 12), np.int64)
    for row, length in enumerate(lengths):
        place = slice(12 - length, None) if model in DECODERS else slice(None, length)
        ids[row, place], mask[row, place] = rng.integers(4, 60, length), 1
    return ids, mask


def always(model: str) -> dict[str, Any]:
    """Return the options that each case of a model gets."""
    return {} if "pad_token_id" in MODELS[model][1] else {"pad_token_id": PAD}


def filling(model: str) -> int:
    """Return the pad token of a model's prompts."""
    return MODELS[model][1].get("pad_token_id", PAD)


def tokenizer(model: str) -> Any:
    """Return a tokenizer with a word of a, b and c for each id, of bytes or, for T5, with a sign for spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["".join(letters) for length in (1, 2, 3, 4) for letters in itertools.product("abc", repeat=length)]
    if model == "t5":
        words = ["<pad>", "</s>", "<unk>", "▁", "é", *"def", *words[:20], *("▁" + word for word in words)][:64]
        core = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=2))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        # The two bytes of an é, and a token that ends one and goes on.
        words = [*"def", "Ã", "©", "©a", *words][:64]
        core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight called `name`."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    norm = len(shape) == 1 and re.search(r"(norm|ln_\w)\.weight$", name)
    # Places and layers matter much, or a model says one token over and over.
    large = {
        "embed_positions": 2.0,
        "wpe": 1.0,
        "relative_attention_bias": 2.0,
        "norm.bias": 0.05,
        "final_logits": 0.05,
        "shared": 0.5,
        "fc1": 1.2,
        "fc2": 1.2,
        "out_proj": 1.2,
        "wo.weight": 1.2,
        ".o.weight": 1.2,
    }
    scale = next((size for part, size in large.items() if part in name), 0.3)
    return (1 + 0.1 * values if norm else scale * values).astype(np.float32)


def write(model: str, keys: dict[str, list[int]], folder: Path) -> Path:
    """Write `config.json` and `model.safetensors` of a model."""
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    class_name, fields = MODELS[model]
    config = AutoConfig.for_model(model.partition(":")[0], **fields)
    config.architectures = [class_name]
    config.save_pretrained(folder)
    state = {name: tensor(name, tuple(shape)) for name, shape in keys.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read() -> dict[str, Any]:
    """Return what `make_generation.py` stored: "keys" by model, "answers" by case, "filters" by name."""
    return json.loads(FILE.read_text())
