"""`distaff predict image-classification`: the pipeline of images on the command line."""

import json
import sys
from dataclasses import dataclass

from distaff.core.errors import UsageError
from distaff.pipelines import pipeline
from distaff.tasks._flags import check_positive, flag
from distaff.tasks._lines import lines_of


@dataclass(kw_only=True)
class ImagesFlags:
    """Flags of `distaff predict image-classification`."""

    model_name_or_path: str = flag("", "Folder or Hub id of a classifier of images; may stand first.", required=True)
    images: list[str] = flag([], "Image files; may follow the model, or come as lines from standard input.")
    top_k: int = flag(5, "Labels an image.")
    batch_size: int = flag(8, "Images at a time.")
    mesh: str | None = flag(None, "Devices that share the work: data=2,tensor=4; by default the first alone.")
    json: bool = flag(False, "Print a line of JSON an image.")


def image_classification(flags: ImagesFlags) -> int:
    """Print the best labels of each image, as they come."""
    check_positive(flags, "top_k batch_size")
    images = flags.images or list(lines_of(sys.stdin, "Standard input"))
    if not images:
        raise UsageError("There is no image: write its name after the model, or pipe names in.")
    settings = {"batch_size": flags.batch_size, "mesh": flags.mesh}
    classify = pipeline("image-classification", flags.model_name_or_path, **settings)
    for image, answer in zip(images, classify.stream(images, top_k=flags.top_k)):
        if flags.json:
            print(json.dumps({"image": image, "labels": answer}, ensure_ascii=False))
            continue
        print(f"{image}  " + "  ".join(f"{each['label']} {each['score']:.3f}" for each in answer))
    return 0
