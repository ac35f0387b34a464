"""BART, and the inputs of all encoder-decoders."""

from typing import Any

import numpy as np

from torch_cases import Cases

BART = {
    "vocab_size": 40,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 24,
}
ODD = {
    "scale_embedding": True,
    "activation_function": "gelu_new",
    "encoder_layers": 1,
    "decoder_layers": 2,
    "pad_token_id": 5,
    "eos_token_id": 3,
    "decoder_start_token_id": 4,
}
TINY = {
    "vocab_size": 24,
    "d_model": 8,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 12,
}
LABELS = {"num_labels": 3, "classifier_dropout": 0.3}

CASES: Cases = {
    "model": ("BartModel", BART, ("mixed", "empty_row", "single", "denoise")),
    "model_odd": ("BartModel", BART | ODD, ("mixed", "denoise")),
    "lm": ("BartForConditionalGeneration", BART, ("mixed", "gradient", "denoise")),
    "lm_odd": ("BartForConditionalGeneration", BART | ODD, ("mixed", "gradient")),
    "lm_tie_broken": ("BartForConditionalGeneration", BART, ("mixed",)),
    "classification": ("BartForSequenceClassification", BART | LABELS, ("ends", "gradient")),
    "regression": ("BartForSequenceClassification", BART | ODD | {"num_labels": 1}, ("ends",)),
    "question_answering": ("BartForQuestionAnswering", BART, ("mixed", "denoise")),
    "tiny_lm": ("BartForConditionalGeneration", BART | TINY, ("mixed",)),
    "tiny_classification": ("BartForSequenceClassification", BART | TINY | LABELS, ("ends",)),
}


def inputs_of(run: str, config: Any, class_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one run; `mixed` has an unpadded, a right-padded and a left-padded row on both sides."""
    rng = np.random.default_rng(11)
    classifier = class_name.endswith("ForSequenceClassification")
    source, target = {"single": ((1, 1), (1, 1)), "long": ((1, 60), (1, 60))}.get(run, ((3, 8), (3, 6)))
    if classifier:  # reads the decoder's state where the source ends
        target = source
    ids, decoder_ids = (rng.integers(6, config.vocab_size, shape) for shape in (source, target))
    mask, decoder_mask = np.ones(source, np.int64), np.ones(target, np.int64)
    if run == "mixed":
        mask[1, 5:] = mask[2, :3] = 0
        decoder_mask[1, 4:] = decoder_mask[2, :2] = 0
    elif run == "empty_row":
        mask[1] = 0
    elif run in ("gradient", "denoise", "ends"):  # no loss on padding, whose embedding PyTorch keeps fixed
        mask[1, 5:] = mask[2, 7:] = 0
        decoder_mask[1, 4:] = 0
    if classifier:
        decoder_mask = mask
        ids[:, 2] = config.eos_token_id
        ids[np.arange(3), mask.sum(axis=1) - 1] = config.eos_token_id
    arrays = {"input_ids": np.where(mask == 1, ids, config.pad_token_id)}
    if run != "single":
        arrays["attention_mask"] = mask
    if run != "denoise" and not class_name.endswith("EncoderModel"):
        arrays["decoder_input_ids"] = np.where(decoder_mask == 1, decoder_ids, config.pad_token_id)
        if run not in ("single", "long", "ends"):
            arrays["decoder_attention_mask"] = decoder_mask
    if run == "gradient":
        if classifier:
            arrays["labels"] = np.array([2, 0, 1])
        else:
            arrays["labels"] = np.where(decoder_mask == 1, rng.integers(0, config.vocab_size, target), -100)
    return {name: value.astype(np.int32) for name, value in arrays.items()}
