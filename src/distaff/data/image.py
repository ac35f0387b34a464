"""Images into batches of pixels: decoded, cropped, flipped and mixed as told, and put through the image processor.

What is drawn for a row is a function of (seed, epoch, the row's number): neither the batch nor the number of threads
matters, and a resumed run draws the same. Mixup alone takes the other image from the same batch.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
from scipy.special import betaincinv

from distaff.core.errors import DataError, UsageError
from distaff.data.draws import row_keys, uniforms
from distaff.data.identity import mark
from distaff.data.image_modes import Image, decode, reason  # says what to install where PIL is not

# How often a crop is drawn before the middle of the image is taken, and how far its sides may differ (Szegedy et al.
# 2014, https://arxiv.org/abs/1409.4842, as torchvision does it).
_TRIES, _RATIOS = 10, (3 / 4, 4 / 3)
_CROP, _MIX = 0, 1


@dataclass(frozen=True)
class Augment:
    """What is done to images in training.

    least_area: a part of the image of at least this share is cut out at random and resized; None leaves that to the
    processor. flip: left and right are exchanged for half of the images. mixup_alpha: images are mixed in shares
    that are Beta(alpha, alpha) (Zhang et al. 2017, https://arxiv.org/abs/1710.09412); 0 for none.
    """

    least_area: float | None = None
    flip: bool = False
    mixup_alpha: float = 0.0


class Preprocess:
    """The image processor of a model: images of one mode to pixels of one size.

    size: (height, width) of every image that comes out. mark: other for another processor.
    """

    def __init__(self, processor: Any, *, channels: int):
        self.processor, self.channels = processor, channels
        wide, tall = (
            self([Image.new("L" if channels == 1 else "RGB", size)]).shape[2:] for size in ((91, 67), (50, 80))
        )
        if wide != tall:
            raise UsageError(
                "The image processor gives images of different sizes, which make no batch: give --image_size, or set "
                "size to a height and a width in preprocessor_config.json."
            )
        self.size: tuple[int, int] = tall
        self.mark = mark(json.dumps(processor.to_dict(), sort_keys=True, default=str))

    def __call__(self, images: Sequence[Image.Image], *, resized: bool = False) -> np.ndarray:
        """Return pixels [images, channels, height, width] float32; with `resized` the size stays as it is."""
        without = {"do_resize": False, "do_center_crop": False} if resized else {}
        try:
            pixels = self.processor(images=list(images), return_tensors="np", **without)["pixel_values"]
        except Exception as error:  # each processor raises its own
            shapes = ", ".join(sorted({f"{image.width} x {image.height}" for image in images}))
            raise DataError(f"The image processor refuses images of {shapes} pixels: {reason(error)}.") from error
        return np.asarray(pixels, np.float32)


@dataclass
class ImageCollate:
    """Makes batches of pixels out of the rows of `load_images`.

    augment: in training, else None. processor: its mark. preprocess, threads: what is run, and in how many.
    """

    augment: Augment | None
    seed: int
    processor: str
    preprocess: InitVar[Preprocess]
    threads: InitVar[int] = 1

    def __post_init__(self, preprocess: Preprocess, threads: int):
        # PIL and NumPy let other threads run while they work: two threads make as many images as two processes (3.7
        # and 4.0 ms for a JPEG of 500 x 375 to 224 x 224, on two busy cores), and hand nothing over.
        self._preprocess, self._threads = preprocess, threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="distaff-images")

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return pixel_values [batch, channels, height, width], labels [batch] int32 and weights [batch] float32.

        With mixup also other_labels [batch] int32 and shares [batch] float32, the part of the row's own label.
        """
        augment = Augment() if self.augment is None else self.augment
        keys = row_keys(self.seed, epoch, indices)
        drawn = uniforms(keys, 4 * _TRIES + 1, draw=_CROP)
        sources, places = rows["image"].to_pylist(), rows["place"].to_pylist()
        real = int((weights > 0).sum())  # the others are a copy of one of them

        def make(chosen: np.ndarray) -> np.ndarray:
            return self._pixels(
                [sources[row] for row in chosen], [places[row] for row in chosen], drawn[chosen], augment
            )

        parts = np.array_split(np.arange(max(real, 1)), min(self._threads * 4, max(real, 1)))
        pixels = np.concatenate(list(self._pool.map(make, parts)))
        pixels = np.concatenate([pixels, np.repeat(pixels[:1], len(weights) - len(pixels), axis=0)])
        labels = rows["label"].to_numpy().astype(np.int32)
        batch = {"pixel_values": pixels, "labels": labels, "weights": weights}
        return self._mix(batch, keys, real) if augment.mixup_alpha else batch

    def _pixels(self, sources: list[dict], places: list[str], drawn: np.ndarray, augment: Augment) -> np.ndarray:
        images = []
        for source, place, numbers in zip(sources, places, drawn):
            data = source["path"] if source["bytes"] is None else source["bytes"]
            image = decode(data, channels=self._preprocess.channels, name=place)
            if augment.least_area is not None:
                box = crop_box(image.size, numbers[:-1], augment.least_area)
                height, width = self._preprocess.size
                image = image.resize((width, height), _resample(self._preprocess.processor), box=box)
            if augment.flip and numbers[-1] < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            images.append(image)
        return self._preprocess(images, resized=augment.least_area is not None)

    def _mix(self, batch: dict[str, np.ndarray], keys: np.ndarray, real: int) -> dict[str, np.ndarray]:
        """Mix each image with the next one of the batch; rows that fill it are mixed with nothing."""
        assert self.augment is not None
        alpha, rows = self.augment.mixup_alpha, np.arange(len(keys))
        other = np.where(rows < real, (rows + 1) % max(real, 1), rows)
        shares = betaincinv(alpha, alpha, uniforms(keys, 1, draw=_MIX)[:, 0]).astype(np.float32)
        pixels, share = batch["pixel_values"], shares[:, None, None, None]
        mixed = share * pixels + (1 - share) * pixels[other]
        return {**batch, "pixel_values": mixed, "other_labels": batch["labels"][other], "shares": shares}


def crop_box(size: tuple[int, int], drawn: np.ndarray, least_area: float) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of a part of an image of (width, height), by numbers [4 tries] in [0, 1).

    Its area is `least_area` to 1 of the image's, its sides are 3:4 to 4:3. Where no try fits, the largest part in the
    middle with such sides is taken.
    """
    width, height = size
    low, high = np.log(_RATIOS)
    for area, ratio, left, top in drawn.reshape(-1, 4):
        pixels = width * height * (least_area + area * (1 - least_area))
        aspect = np.exp(low + ratio * (high - low))
        wide, tall = round(float((pixels * aspect) ** 0.5)), round(float((pixels / aspect) ** 0.5))
        if 0 < wide <= width and 0 < tall <= height:
            x, y = int(left * (width - wide + 1)), int(top * (height - tall + 1))
            return x, y, x + wide, y + tall
    wide = max(1, min(width, round(height * _RATIOS[1])))
    tall = max(1, min(height, round(width / _RATIOS[0])))
    x, y = (width - wide) // 2, (height - tall) // 2
    return x, y, x + wide, y + tall


def _resample(processor: Any) -> int:
    filter_ = getattr(processor, "resample", None)
    return Image.Resampling.BILINEAR if filter_ is None else int(filter_)
