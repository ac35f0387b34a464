"""Make image_pipeline.json: what the pipeline of PyTorch's Transformers answers for models of the golden cases.

Run it as `PYTHONPATH=tests python tests/golden/make_image_pipeline.py` where torch, transformers and Pillow are
installed; distaff itself needs no torch.
"""

import json
import tempfile
from pathlib import Path

import transformers

from golden import image_pipeline_cases as images


def main() -> None:
    """Write the answers."""
    answers = {}
    for name in images.NAMES:
        with tempfile.TemporaryDirectory() as folder:
            images.write(name, Path(folder))
            processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
            classify = transformers.pipeline("image-classification", folder, image_processor=processor)
            for number, image in enumerate(images.pictures()):
                for function in ("softmax", "sigmoid", "none"):
                    answers[f"{name}/{number}/{function}"] = classify(image, function_to_apply=function, top_k=3)
    text = json.dumps({"transformers": transformers.__version__, "answers": answers}, indent=1)
    images.STORED.write_text(text + "\n")


if __name__ == "__main__":
    main()
