"""ResNet."""

from torch_cases import Cases
from torch_cases.vit import inputs_of

__all__ = ["CASES", "inputs_of"]

RESNET = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2], "layer_type": "bottleneck"}
BASIC = {"embedding_size": 12, "hidden_sizes": [12, 16], "layer_type": "basic"}
# Each option at the value it does not have by default.
ODD = {"downsample_in_first_stage": True, "downsample_in_bottleneck": True, "hidden_act": "gelu", "num_channels": 1}
ONE_LAYER = {"hidden_sizes": [8], "depths": [1]}
TINY = {"embedding_size": 4, "hidden_sizes": [8, 12]}
LABELS = {"num_labels": 3}

CASES: Cases = {
    "model": ("ResNetModel", RESNET, ("mixed", "train")),
    "model_one_layer": ("ResNetModel", RESNET | ONE_LAYER, ("mixed",)),
    "model_odd": ("ResNetModel", RESNET | ODD, ("mixed", "train")),
    "model_basic": ("ResNetModel", RESNET | BASIC, ("mixed", "train")),
    "model_basic_odd": ("ResNetModel", RESNET | BASIC | ODD, ("mixed",)),
    "classification": ("ResNetForImageClassification", RESNET | LABELS, ("mixed", "gradient", "train")),
    "classification_basic": ("ResNetForImageClassification", RESNET | BASIC | LABELS, ("mixed", "gradient")),
    "classification_training": ("ResNetForImageClassification", RESNET | LABELS, ("mixed", "gradient")),
    "classification_basic_training": ("ResNetForImageClassification", RESNET | BASIC | LABELS, ("mixed", "gradient")),
    "tiny_classification": ("ResNetForImageClassification", RESNET | TINY | LABELS, ("mixed",)),
    "tiny_basic": ("ResNetModel", RESNET | BASIC | TINY, ("mixed",)),
}
