"""Models, processors and pictures of the golden answers of the image-classification pipeline."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from golden import cases as golden

STORED = Path(__file__).with_name("image_pipeline.json")
_SHARED = {"do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255, "resample": 3}
# As published models say it: ViT to a size, ResNet to the shorter side and the middle of it.
PROCESSORS = {
    "vit": {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}},
    "resnet": {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875, "size": {"shortest_edge": 24}},
}
NAMES = tuple(PROCESSORS)


def write(name: str, folder: Path) -> None:
    """Write a model with its processor."""
    case = golden.read(name)["classification"]
    labels = {number: f"kind {number}" for number in range(len(case.config["id2label"]))}
    golden.write(case, folder, id2label=labels, label2id={label: number for number, label in labels.items()})
    channels = case.config["num_channels"]
    scale = {"image_mean": [0.4, 0.5, 0.6][:channels], "image_std": [0.2, 0.3, 0.25][:channels]}
    (folder / "preprocessor_config.json").write_text(json.dumps({**_SHARED, **PROCESSORS[name], **scale}))


def pictures() -> list[Image.Image]:
    """Return pictures that are as large as the model's, larger, and oblong."""
    rng = np.random.default_rng(3)
    return [
        Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8)) for size in ((16, 16), (40, 57), (90, 20))
    ]
