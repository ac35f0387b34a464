"""ELECTRA."""

from torch_cases import Cases
from torch_cases.bert import BERT, ODD, ONE_LAYER, TINY, UNTIED, inputs_of

__all__ = ["CASES", "inputs_of"]

ELECTRA = BERT | {"embedding_size": 16}
SUMMARY = {"summary_use_proj": False, "summary_activation": "tanh"}

CASES: Cases = {
    "model": ("ElectraModel", ELECTRA, ("mixed", "empty_row", "positions", "single")),
    "model_one_layer": ("ElectraModel", ELECTRA | ONE_LAYER | {"type_vocab_size": 1}, ("mixed",)),
    "model_odd": ("ElectraModel", ELECTRA | ODD | {"embedding_size": 24, "pad_token_id": 5}, ("mixed",)),
    "pretraining": ("ElectraForPreTraining", ELECTRA, ("mixed",)),
    "pretraining_odd": ("ElectraForPreTraining", ELECTRA | ODD, ("mixed",)),
    "masked_lm": ("ElectraForMaskedLM", ELECTRA, ("mixed", "gradient")),
    "masked_lm_odd": ("ElectraForMaskedLM", ELECTRA | ODD | {"embedding_size": 24}, ("mixed",)),
    "masked_lm_untied": ("ElectraForMaskedLM", ELECTRA | UNTIED, ("mixed",)),
    "classification": (
        "ElectraForSequenceClassification",
        ELECTRA | {"num_labels": 3, "classifier_dropout": 0.3},
        ("mixed", "gradient"),
    ),
    "multiple_choice": ("ElectraForMultipleChoice", ELECTRA, ("choices",)),
    "multiple_choice_last": ("ElectraForMultipleChoice", ELECTRA | SUMMARY | {"summary_type": "last"}, ("choices",)),
    "multiple_choice_mean": (
        "ElectraForMultipleChoice",
        ELECTRA | {"summary_type": "mean", "summary_activation": ""},
        ("choices",),
    ),
    "token_classification": ("ElectraForTokenClassification", ELECTRA | {"num_labels": 5}, ("mixed",)),
    "question_answering": ("ElectraForQuestionAnswering", ELECTRA, ("mixed",)),
    "tiny_masked_lm": ("ElectraForMaskedLM", ELECTRA | TINY | {"embedding_size": 4}, ("mixed",)),
    "tiny_pretraining": ("ElectraForPreTraining", ELECTRA | TINY | {"embedding_size": 4}, ("mixed",)),
}
