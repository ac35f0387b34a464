"""Image files of every mode to eight-bit images of one or three channels, with PIL.

- Transparency is laid on white.
- Grey of 16 bits is divided by 257, so that white stays white; numbers of 32 bits count as 16-bit ones.
- Floating images of values in 0..1 are multiplied by 255; others must lie in 0..255.
- The rotation in EXIF is applied. Of an animation the first frame is taken.
- Everything else (palettes, 1 bit, CMYK, YCbCr, LAB, HSV) is what PIL converts it to.
"""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from distaff.core.errors import DataError, MissingExtraError

try:
    from PIL import Image, ImageOps
except ImportError as error:
    raise MissingExtraError("PIL", "vision", "Reading images") from error

# What the two kinds of models take.
MODES = {1: "L", 3: "RGB"}
_SIXTEEN_BITS = 2**16 - 1


def decode(source: Any, *, channels: int, name: str) -> Image.Image:
    """Return an image of mode L or RGB. Raises `DataError`, which says `name`, for what is no image or is damaged.

    Args:
        source: a path, the bytes of a file, a PIL image, or an array [height, width] or [height, width, 1, 3 or 4],
            of uint8 or of floats in 0..1.
        channels: 1 or 3.
        name: what to call the image in an error.
    """
    try:
        if isinstance(source, np.ndarray):
            return as_mode(_of_array(source, name), MODES[channels], name)
        if isinstance(source, Image.Image):
            return as_mode(_upright(source), MODES[channels], name)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return as_mode(_upright(image), MODES[channels], name)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"There is no image '{name}': check its name and the folder that it is looked for in."
        ) from error
    except Exception as error:  # each of PIL's formats raises its own
        raise DataError(
            f"'{name}' is no image that can be read ({reason(error)}): replace it or leave it out."
        ) from error


def check_header(path: str | os.PathLike) -> str | None:
    """Return what is wrong with the beginning of an image file, None where it looks like one."""
    try:
        with Image.open(path):
            return None
    except Exception as error:  # each of PIL's formats raises its own
        return "0 bytes" if Path(path).is_file() and not os.path.getsize(path) else reason(error)


def suffixes() -> frozenset[str]:
    """Return the endings of the files that PIL reads, such as ".png"."""
    return frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def as_mode(image: Image.Image, mode: str, name: str) -> Image.Image:
    """Return `image` in `mode`, L or RGB."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_eight_bits(image, name)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    # PIL has no way from LAB and CMYK to grey but through RGB.
    return image.convert("RGB").convert(mode) if image.mode != mode else image


def reason(error: Exception) -> str:
    """Return in a few words why an image does not open."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "of no format that PIL knows"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # A camera's notes that are damaged; the pixels are not.
        return image


def _to_eight_bits(image: Image.Image, name: str) -> Image.Image:
    values = np.asarray(image)
    least, most = float(values.min()), float(values.max())
    if image.mode == "F":
        if not (np.isfinite(least) and np.isfinite(most) and least >= 0 and most <= 255):
            raise DataError(f"'{name}' has floating values from {least:g} to {most:g}: scale them to 0..1 or 0..255.")
        scale = 255.0 if most <= 1 else 1.0
    else:
        if least < 0 or most > _SIXTEEN_BITS:
            raise DataError(f"'{name}' has values from {least:g} to {most:g}: scale them to 16 bits, 0..65535.")
        scale = 1 / 257
    return Image.fromarray(np.rint(values * scale).astype(np.uint8))


def _of_array(values: np.ndarray, name: str) -> Image.Image:
    shape = list(values.shape)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))) or 0 in values.shape:
        raise DataError(f"{name} is an array {shape} and must be [height, width] or [height, width, channels].")
    if values.dtype == bool:
        values = values.astype(np.uint8) * 255
    if np.issubdtype(values.dtype, np.floating):
        if not (values.min() >= 0 and values.max() <= 1):
            raise DataError(f"{name} is an array of floats that do not lie in 0..1: scale it, or pass uint8.")
        values = np.rint(values * 255).astype(np.uint8)
    if values.dtype == np.uint16 and values.ndim == 2:
        values = np.rint(values / 257).astype(np.uint8)
    if values.dtype != np.uint8:
        raise DataError(f"{name} is an array of {values.dtype}: pass uint8, or floats in 0..1.")
    return Image.fromarray(np.ascontiguousarray(values))
