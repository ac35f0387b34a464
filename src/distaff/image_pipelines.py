"""The pipeline of images: image-classification."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from distaff.core.errors import UsageError
from distaff.data.image import Preprocess
from distaff.data.image_modes import decode
from distaff.hub import open_image_processor, resolve
from distaff.models.auto import FlaxAutoModelForImageClassification
from distaff.pipeline_base import check_batch_size, loading_settings

FUNCTIONS = ("softmax", "sigmoid", "none")


class ImageClassificationPipeline:
    """Says what is on images, as `{"label", "score"}`, the best first.

    Args:
        model: a folder, a Hub id, or a model object with its `image_processor`.
        image_processor: a folder, a Hub id, or an object, by default the model's.
        batch_size: images at a time.
        top_k, function_to_apply: defaults of calls.
        settings: `dtype`, `mesh` and `attn_implementation` of the model; `revision` and `token`.
    """

    task: ClassVar[str] = "image-classification"

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        image_processor: Any = None,
        batch_size: int = 8,
        top_k: int = 5,
        function_to_apply: str | None = None,
        **settings: Any,
    ):
        if tokenizer is not None:
            raise UsageError("Images have no tokenizer: leave it out, or pass image_processor=...")
        loading = loading_settings(settings)
        if unknown := sorted(settings.keys() - {"revision", "token"}):
            raise UsageError(
                f"The image-classification pipeline has no setting '{unknown[0]}': it has image_processor, batch_size, "
                "top_k, function_to_apply, dtype, mesh, attn_implementation, revision and token."
            )
        if isinstance(image_processor, str | os.PathLike):
            image_processor = open_image_processor(resolve(str(image_processor), weights=False))
        if isinstance(model, str | os.PathLike):
            folder = resolve(str(model), **settings)
            image_processor = open_image_processor(folder) if image_processor is None else image_processor
            model = FlaxAutoModelForImageClassification.from_pretrained(folder, **loading)
        elif settings or loading:
            raise UsageError(f"The model is loaded already: leave {' and '.join([*settings, *loading])} out.")
        if image_processor is None:
            raise UsageError("A model object needs its image processor: pass image_processor=...")
        _check(top_k, function_to_apply)
        self.model, self.batch_size = model, check_batch_size(batch_size)
        self.top_k, self.function_to_apply = top_k, function_to_apply
        self.preprocess = Preprocess(image_processor, channels=model.config.num_channels)

    def __call__(
        self,
        images: Any,
        *,
        top_k: int | None = None,
        function_to_apply: str | None = None,
        batch_size: int | None = None,
    ) -> list[Any]:
        """Return the best `top_k` labels of an image, or a list of them for each of several.

        An image is a path, the bytes of a file, a PIL image or an array [height, width(, channels)] of uint8 or of
        floats in 0..1; several are a list, a generator or an array with one more axis. Scores are probabilities, of
        all labels together or (`function_to_apply="sigmoid"`, and by default where the config says that an image
        may have several labels) of each alone; with "none" they are the model's logits.

        Raises `DataError` for what is no image, by its path or number.
        """
        top_k = self.top_k if top_k is None else top_k
        function = self.function_to_apply if function_to_apply is None else function_to_apply
        _check(top_k, function)
        single = isinstance(images, str | bytes | os.PathLike) or not isinstance(images, Iterable)
        single = single or (isinstance(images, np.ndarray) and images.ndim < 4)
        given = [images] if single else images
        answers = list(self.stream(given, top_k=top_k, function_to_apply=function, batch_size=batch_size))
        return answers[0] if single else answers

    def stream(
        self,
        images: Iterable[Any],
        *,
        top_k: int | None = None,
        function_to_apply: str | None = None,
        batch_size: int | None = None,
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the answer of each image, `batch_size` of which are read at a time."""
        size = check_batch_size(self.batch_size if batch_size is None else batch_size)
        top_k = self.top_k if top_k is None else top_k
        function = self.function_to_apply if function_to_apply is None else function_to_apply
        _check(top_k, function)
        function = function or _usual_function(self.model.config)
        rest, done = iter(images), 0
        while batch := list(islice(rest, size)):
            for scores in self._scores(batch, done, function, size):
                best = np.argsort(-scores, kind="stable")[:top_k]
                yield [{"label": self.model.config.id2label[int(k)], "score": float(scores[k])} for k in best]
            done += len(batch)

    def _scores(self, images: list[Any], done: int, function: str, size: int) -> np.ndarray:
        """Return `[images, labels]`."""
        channels = self.preprocess.channels
        opened = [
            decode(_source(image), channels=channels, name=_name(image, done + place))
            for place, image in enumerate(images)
        ]
        pixels = self.preprocess(opened)
        # Few sizes are few programs.
        rows = min(size, 1 << (len(pixels) - 1).bit_length())
        pixels = np.concatenate([pixels, np.repeat(pixels[:1], rows - len(pixels), axis=0)])
        logits = np.asarray(self.model(pixels).logits, np.float64)[: len(images)]
        if function == "none":
            return logits
        if function == "sigmoid":
            return 1 / (1 + np.exp(-logits))
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        return shifted / shifted.sum(-1, keepdims=True)


def _usual_function(config: Any) -> str:
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    return "sigmoid" if several or config.num_labels == 1 else "softmax"


def _source(image: Any) -> Any:
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise UsageError(f"'{image}' is an address: download the image first.")
    return os.fspath(image) if isinstance(image, os.PathLike) else image


def _name(image: Any, number: int) -> str:
    return os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {number}"


def _check(top_k: int, function: str | None) -> None:
    if top_k < 1:
        raise UsageError(f"top_k is {top_k}: it must be at least 1.")
    if function not in (None, *FUNCTIONS):
        raise UsageError(f"function_to_apply is '{function}' and must be one of {', '.join(FUNCTIONS)}.")
