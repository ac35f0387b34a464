"""BERT, and the inputs of all encoders of its kind."""

from typing import Any

import numpy as np

from torch_cases import Cases

BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
TINY = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}
ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
ODD = {"hidden_size": 24, "num_attention_heads": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
UNTIED = {"tie_word_embeddings": False, "hidden_act": "relu"}


CASES: Cases = {
    "model": ("BertModel", BERT, ("mixed", "empty_row", "positions", "single")),
    "model_one_layer": ("BertModel", BERT | ONE_LAYER | {"type_vocab_size": 1}, ("mixed",)),
    "model_odd": ("BertModel", BERT | ODD | {"pad_token_id": 5, "type_vocab_size": 1}, ("mixed",)),
    "pretraining": ("BertForPreTraining", BERT, ("mixed",)),
    "masked_lm": ("BertForMaskedLM", BERT, ("mixed", "gradient")),
    "masked_lm_odd": ("BertForMaskedLM", BERT | ODD, ("mixed",)),
    "masked_lm_untied": ("BertForMaskedLM", BERT | UNTIED, ("mixed",)),
    "masked_lm_tie_broken": ("BertForMaskedLM", BERT, ("mixed",)),
    "next_sentence": ("BertForNextSentencePrediction", BERT, ("mixed",)),
    "classification": (
        "BertForSequenceClassification",
        BERT | {"num_labels": 3, "classifier_dropout": 0.3},
        ("mixed", "gradient"),
    ),
    "regression": (
        "BertForSequenceClassification",
        BERT | {"num_labels": 1, "problem_type": "regression"},
        ("mixed",),
    ),
    "multi_label": (
        "BertForSequenceClassification",
        BERT | {"num_labels": 4, "problem_type": "multi_label_classification"},
        ("mixed",),
    ),
    "multiple_choice": ("BertForMultipleChoice", BERT, ("choices",)),
    "token_classification": ("BertForTokenClassification", BERT | {"num_labels": 5}, ("mixed",)),
    "question_answering": ("BertForQuestionAnswering", BERT, ("mixed",)),
    "tiny_masked_lm": ("BertForMaskedLM", BERT | TINY, ("mixed",)),
    "tiny_pretraining": ("BertForPreTraining", BERT | TINY, ("mixed",)),
}


def inputs_of(run: str, config: Any, class_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one run; `mixed` has an unpadded, a right-padded and a left-padded row."""
    rng = np.random.default_rng(7)
    pad, types = config.pad_token_id, config.type_vocab_size
    shape = {"single": (1, 1), "choices": (2, 3, 8), "padded_pair": (2, 6)}.get(run, (3, 8))
    ids = rng.integers(6, config.vocab_size, shape)  # above every special id, so that only padding is padding
    mask = np.ones(shape, np.int64)
    if run == "padded_pair":  # the rows of the reported case, with this config's padding id
        mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
        ids = np.array([[3, 5, 6, 2, pad, pad], [3, 7, 2, pad, pad, pad]])
    elif run == "choices":
        mask[0, 1, 5:] = mask[1, 2, 3:] = 0
    elif run == "mixed":
        mask[1, 5:] = mask[2, :3] = 0
    elif run == "empty_row":
        mask[1] = mask[2, 6:] = 0
    elif run == "gradient":  # no loss on padding, whose embedding PyTorch keeps fixed
        mask[1, 5:] = mask[2, 7:] = 0
    ids = np.where(mask == 1, ids, pad)
    arrays = {"input_ids": ids}
    if run == "positions":
        arrays["position_ids"] = rng.integers(2, config.max_position_embeddings, shape)
    elif run != "single":
        arrays["attention_mask"] = mask
    if types > 1:
        arrays["token_type_ids"] = rng.integers(0, types, shape)
    if run == "gradient":
        if class_name.endswith("ForSequenceClassification"):
            arrays["labels"] = np.array([2, 0, 1])
        else:
            chosen = (rng.random(shape) < 0.5) & (mask == 1)
            arrays["labels"] = np.where(chosen, rng.integers(0, config.vocab_size, shape), -100)
    return {name: value.astype(np.int32) for name, value in arrays.items()}
