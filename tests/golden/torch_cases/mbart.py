"""mBART."""

from torch_cases import Cases
from torch_cases.bart import BART, LABELS, TINY, inputs_of

__all__ = ["CASES", "inputs_of"]

# Its inputs start with the language of their row.
ODD = {"scale_embedding": True, "activation_function": "relu", "encoder_layers": 1, "decoder_layers": 2}

CASES: Cases = {
    "model": ("MBartModel", BART, ("mixed", "single", "denoise")),
    "lm": ("MBartForConditionalGeneration", BART, ("mixed", "gradient", "denoise")),
    "lm_odd": ("MBartForConditionalGeneration", BART | ODD | {"pad_token_id": 5}, ("mixed", "denoise")),
    "classification": ("MBartForSequenceClassification", BART | LABELS, ("ends",)),
    "question_answering": ("MBartForQuestionAnswering", BART, ("mixed",)),
    "tiny_lm": ("MBartForConditionalGeneration", BART | TINY, ("mixed",)),
    "tiny_classification": ("MBartForSequenceClassification", BART | TINY | LABELS, ("ends",)),
}
