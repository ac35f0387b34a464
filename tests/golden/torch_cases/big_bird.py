"""BigBird. Rows of 8 tokens are attended to in full unless blocks are of one token (`BY_TOKEN`)."""

from typing import Any

import numpy as np

from torch_cases import Cases
from torch_cases.bert import BERT, ODD, TINY, UNTIED
from torch_cases.bert import inputs_of as bert_inputs

BIG_BIRD = BERT | {"max_position_embeddings": 128, "block_size": 4, "num_random_blocks": 2}
BY_TOKEN = BIG_BIRD | {"block_size": 1, "num_random_blocks": 1}
ODD_BLOCKS = {"use_bias": False, "rescale_embeddings": True, "block_size": 3, "num_random_blocks": 3, "pad_token_id": 5}
FULL = {"attention_type": "original_full"}
ANSWERS = {"sep_token_id": 20}

CASES: Cases = {
    "model": ("BigBirdModel", BIG_BIRD, ("mixed", "empty_row", "positions", "single")),
    "model_full": ("BigBirdModel", BIG_BIRD | ODD | ODD_BLOCKS | FULL, ("long",)),
    "model_sparse": ("BigBirdModel", BIG_BIRD, ("long",)),
    "model_sparse_one_layer": ("BigBirdModel", BIG_BIRD | {"num_hidden_layers": 1}, ("long",)),
    "pretraining": ("BigBirdForPreTraining", BIG_BIRD, ("mixed",)),
    "masked_lm": ("BigBirdForMaskedLM", BIG_BIRD, ("mixed", "gradient")),
    "masked_lm_untied": ("BigBirdForMaskedLM", BIG_BIRD | UNTIED, ("mixed",)),
    "masked_lm_tie_broken": ("BigBirdForMaskedLM", BIG_BIRD, ("mixed",)),
    "masked_lm_sparse": ("BigBirdForMaskedLM", BIG_BIRD, ("ragged",)),
    "masked_lm_sparse_odd": ("BigBirdForMaskedLM", BIG_BIRD | ODD | ODD_BLOCKS, ("ragged",)),
    "masked_lm_by_token": ("BigBirdForMaskedLM", BY_TOKEN, ("mixed", "empty_row")),
    "classification": (
        "BigBirdForSequenceClassification",
        BIG_BIRD | {"num_labels": 3, "classifier_dropout": 0.3},
        ("mixed", "gradient"),
    ),
    "classification_odd": ("BigBirdForSequenceClassification", BY_TOKEN | ODD | {"num_labels": 2}, ("mixed",)),
    "multiple_choice": ("BigBirdForMultipleChoice", BY_TOKEN, ("choices",)),
    "token_classification": ("BigBirdForTokenClassification", BIG_BIRD | {"num_labels": 5}, ("ragged",)),
    "question_answering": ("BigBirdForQuestionAnswering", BIG_BIRD | ANSWERS, ("question", "mixed")),
    "question_answering_sparse": ("BigBirdForQuestionAnswering", BIG_BIRD | ANSWERS, ("ragged",)),
    "tiny_pretraining": ("BigBirdForPreTraining", BIG_BIRD | TINY | FULL, ("mixed",)),
}


def inputs_of(run: str, config: Any, class_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one run: those of BERT, whole blocks, rows that end within a block, and a question."""
    if run not in ("long", "ragged", "question"):
        return bert_inputs(run, config, class_name)
    rng = np.random.default_rng(8)
    shape = {"long": (1, 40), "ragged": (3, 37), "question": (3, 8)}[run]
    ids = rng.integers(6, config.vocab_size, shape)
    mask = np.ones(shape, np.int64)
    if run != "long":
        mask[1, -5:] = mask[2, :3] = 0
    if run == "question":  # in two of the rows a separator, and no token types: those of the question are found
        ids[0, 2] = ids[0, 6] = ids[1, 1] = config.sep_token_id
    arrays = {"input_ids": np.where(mask == 1, ids, config.pad_token_id), "attention_mask": mask}
    if run != "question":
        arrays["token_type_ids"] = rng.integers(0, config.type_vocab_size, shape)
    return {name: value.astype(np.int32) for name, value in arrays.items()}
