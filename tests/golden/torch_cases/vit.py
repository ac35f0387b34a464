"""ViT, and the inputs of all families of images."""

from typing import Any

import numpy as np

from torch_cases import Cases

VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "image_size": [8, 20]}
ODD = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-3,
    "image_size": [10, 18],
    "patch_size": [3, 5],
    "num_channels": 1,
    "qkv_bias": False,
    "pooler_output_size": 10,
    "pooler_act": "gelu",
}
TINY = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "image_size": 8}
# Sizes of images that need other positions: larger and not square, smaller and with pixels left over.
SIZES = {"grown": (24, 36), "shrunk": (9, 14), "turned": (8, 32)}

CASES: Cases = {
    "model": ("ViTModel", VIT, ("mixed", *SIZES)),
    "model_one_layer": ("ViTModel", VIT | ONE_LAYER, ("mixed",)),
    "model_odd": ("ViTModel", VIT | ODD, ("mixed",)),
    "classification": ("ViTForImageClassification", VIT | {"num_labels": 3}, ("mixed", "gradient", "grown")),
    "classification_odd": ("ViTForImageClassification", VIT | ODD | {"num_labels": 3}, ("mixed", "gradient")),
    "tiny_model": ("ViTModel", VIT | TINY, ("mixed",)),
    "tiny_classification": ("ViTForImageClassification", VIT | TINY | {"num_labels": 3}, ("mixed",)),
}


def inputs_of(run: str, config: Any, class_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one run; `train` has two batches."""
    rng = np.random.default_rng(7)
    size = SIZES.get(run, getattr(config, "image_size", (20, 28)))
    size = (size, size) if isinstance(size, int) else tuple(size)
    batch = {"train": (2, 4)}.get(run, (3,))
    # Few values, so that the stored file is small.
    levels = rng.integers(-8, 9, (*batch, config.num_channels, *size))
    arrays = {"pixel_values": (levels / 4).astype(np.float32)}
    if run in SIZES:
        arrays["interpolate_pos_encoding"] = np.array(True)
    if run == "gradient":
        arrays["labels"] = np.array([2, 0, 1], np.int32)
    return arrays
