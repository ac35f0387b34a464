"""RoBERTa and XLM-RoBERTa."""

from torch_cases import Cases
from torch_cases.bert import BERT, ODD, ONE_LAYER, TINY, UNTIED, inputs_of

__all__ = ["CASES", "inputs_of"]

ROBERTA = BERT | {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5}

CASES: Cases = {
    "model": ("RobertaModel", ROBERTA, ("mixed", "empty_row", "positions", "single", "padded_pair")),
    "model_pad_zero": ("RobertaModel", ROBERTA | {"pad_token_id": 0}, ("mixed", "padded_pair")),
    "model_one_layer": ("RobertaModel", ROBERTA | ONE_LAYER, ("mixed",)),
    "model_odd": ("RobertaModel", ROBERTA | ODD | {"pad_token_id": 5, "type_vocab_size": 2}, ("mixed",)),
    "masked_lm": ("RobertaForMaskedLM", ROBERTA, ("mixed", "gradient")),
    "masked_lm_odd": ("RobertaForMaskedLM", ROBERTA | ODD, ("mixed",)),
    "masked_lm_untied": ("RobertaForMaskedLM", ROBERTA | UNTIED, ("mixed",)),
    "masked_lm_tie_broken": ("RobertaForMaskedLM", ROBERTA, ("mixed",)),
    "causal_lm": ("RobertaForCausalLM", ROBERTA | {"is_decoder": True}, ("mixed", "gradient")),
    "classification": (
        "RobertaForSequenceClassification",
        ROBERTA | {"num_labels": 3, "classifier_dropout": 0.3},
        ("mixed", "gradient"),
    ),
    "regression": (
        "RobertaForSequenceClassification",
        ROBERTA | {"num_labels": 1, "problem_type": "regression"},
        ("mixed",),
    ),
    "multiple_choice": ("RobertaForMultipleChoice", ROBERTA, ("choices",)),
    "token_classification": ("RobertaForTokenClassification", ROBERTA | {"num_labels": 5}, ("mixed",)),
    "question_answering": ("RobertaForQuestionAnswering", ROBERTA, ("mixed",)),
    "xlm_model": ("XLMRobertaModel", ROBERTA, ("mixed",)),
    "xlm_masked_lm": ("XLMRobertaForMaskedLM", ROBERTA, ("mixed",)),
    "tiny_masked_lm": ("RobertaForMaskedLM", ROBERTA | TINY, ("mixed",)),
    "tiny_classification": ("RobertaForSequenceClassification", ROBERTA | TINY | {"num_labels": 3}, ("mixed",)),
}
