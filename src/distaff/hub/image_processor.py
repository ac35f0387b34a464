"""Opening the image processor of a folder, and making one for a model from scratch."""

from pathlib import Path
from typing import Any

from distaff.core.errors import CheckpointError, MissingExtraError

FILE = "preprocessor_config.json"


def open_image_processor(folder: Path) -> Any:
    """Return the image processor that `preprocessor_config.json` in `folder` describes, in its PIL version.

    Raises `CheckpointError` where there is none: with which numbers the model's images were scaled nobody else knows.
    """
    processors = _processors()
    remedy = "copy one there, or give image_processor_name (in a pipeline image_processor)"
    if not (folder / FILE).is_file():
        raise CheckpointError(f"'{folder}' holds no {FILE}, which says how images become pixels: {remedy}.")
    try:
        return processors.AutoImageProcessor.from_pretrained(folder, backend="pil")
    except Exception as error:  # each processor class raises its own
        # Transformers goes on to list every type that it knows.
        reason = " ".join(str(error).split())[:160].rstrip(".")
        raise CheckpointError(f"The image processor in '{folder}' does not open ({reason}): {remedy}.") from error


def new_image_processor(*, height: int, width: int, channels: int) -> Any:
    """Return a processor that resizes to `height` and `width` and brings pixels to -1..1."""
    half = [0.5] * channels
    size = {"height": height, "width": width}
    return _processors().ViTImageProcessorPil(size=size, image_mean=half, image_std=half)


def _processors() -> Any:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("PIL", "vision", "Reading images") from error
    import transformers

    return transformers
