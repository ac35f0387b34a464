"""Flags, data and model of image classification."""

import io
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from PIL import Image

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.batches import Batches
from distaff.data.draws import row_keys
from distaff.data.hub_images import load_hub_images
from distaff.data.hub_text import split_names
from distaff.data.image import Augment, ImageCollate, Preprocess
from distaff.data.image_modes import MODES
from distaff.data.image_sets import Columns, load_images, split_images
from distaff.hub import new_image_processor, open_image_processor, resolve
from distaff.hub.image_processor import FILE
from distaff.models._vision import pair_of
from distaff.models.auto import FlaxAutoModelForImageClassification
from distaff.tasks import _recipe as recipe
from distaff.tasks._finetune import check_head
from distaff.tasks._finetune_flags import FinetuneFlags
from distaff.tasks._flags import check_positive, flag

logger = logging.getLogger("distaff")

# The side of images where neither a flag, a processor nor a config says one; of the old script.
IMAGE_SIZE = 224
# More threads wait for each other, and the step needs some of the cores too.
_MOST_THREADS = 16


@dataclass(kw_only=True)
class ImageClassificationFlags(FinetuneFlags):
    """Flags of `distaff train image-classification` and `distaff eval image-classification`."""

    train_dir: str | None = flag(None, "Folder of images to train on, in a folder a class.")
    validation_dir: str | None = flag(None, "The same to evaluate on.")
    test_dir: str | None = flag(None, "Folder of images to predict for, anywhere in it.")
    train_file: str | None = flag(None, "Instead of the folder: .csv, .jsonl, .json or .parquet of paths and labels.")
    validation_file: str | None = flag(None, "The same to evaluate on.")
    test_file: str | None = flag(None, "The same to predict for; labels may be absent.")
    validation_split_percentage: int = flag(15, "Percent of each class to evaluate on if there are no other images.")
    image_column_name: str | None = flag(None, "Column of the images, by default the first of a usual name.")
    label_column_name: str | None = flag(None, "Column of the labels, likewise.")
    image_processor_name: str | None = flag(None, "Image processor to use instead of the checkpoint's.")
    image_size: int | None = flag(
        None, "Side of the images in pixels, by default the processor's, the config's or 224; positions are resized."
    )
    ignore_mismatched_sizes: bool = flag(False, "Begin with a new head where the checkpoint's has other labels.")
    random_resized_crop: bool = flag(True, "Train on random parts of the images.")
    min_crop_area: float = flag(0.08, "The least part of an image's area that is cut out.")
    horizontal_flip: bool = flag(True, "Train on mirror images for half of the images.")
    mixup_alpha: float = flag(0.0, "Mix images and labels in pairs, in shares of Beta(alpha, alpha); 0 for not.")

    def check(self) -> None:
        """Raise `UsageError` for values that neither a training nor an evaluation can have."""
        super().check()
        check_positive(self, "image_size")
        if self.tokenizer_name is not None:
            raise UsageError("Images have no tokenizer: leave --tokenizer_name out; --image_processor_name is theirs.")
        for split in ("train", "validation", "test"):
            folder, file = (getattr(self, f"{split}_{kind}") for kind in ("dir", "file"))
            if folder and file:
                raise UsageError(f"--{split}_dir and --{split}_file name different images: give one of them.")
            if folder and not Path(folder).is_dir():
                raise UsageError(f"--{split}_dir '{folder}' is no folder: check its name.")
        if self.do_predict and not (self.test_dir or self.test_file or self.dataset_name):
            raise UsageError("--do_predict has nothing to predict for: give --test_dir or --test_file.")

    def check_selection(self) -> None:
        """Raise `UsageError` for values that no training can have."""
        super().check_selection()
        if not (self.train_dir or self.train_file or self.dataset_name):
            raise UsageError("There are no images to train on: give --train_dir, --train_file or --dataset_name.")
        if not 0 < self.min_crop_area <= 1:
            raise UsageError(f"--min_crop_area is {self.min_crop_area}: it must be above 0 and at most 1.")
        if not 0 <= self.mixup_alpha < float("inf"):
            raise UsageError(f"--mixup_alpha is {self.mixup_alpha}: it must be 0 or more.")

    def has_evaluation(self) -> bool:
        """Tell whether the flags name images to evaluate on."""
        return bool(
            self.validation_dir or self.validation_file or self.train_dir or self.train_file or self.dataset_name
        )

    def augment(self) -> Augment:
        """What is done to images in training."""
        least = self.min_crop_area if self.random_resized_crop else None
        return Augment(least, self.horizontal_flip, self.mixup_alpha)


# Data.


@dataclass(frozen=True)
class Images:
    """The sets that the flags ask for, each None where not asked for, and the names of labels."""

    names: list[str]
    train: Any = None
    validation: Any = None
    test: Any = None


def read_images(flags: ImageClassificationFlags, config: Any) -> Images:
    """Return the images that are asked for, their labels numbered as the model numbers them.

    In training labels are those of the training images, or the checkpoint's where it knows all of them.
    """
    if flags.do_eval and not flags.has_evaluation():
        raise UsageError("There are no images to evaluate on: give --validation_dir or --validation_file.")
    own = _has(flags, "validation")
    known = names_of(config)
    train = evaluation = test = None
    if flags.do_train:
        train, found = load(flags, "train")
        if len(found) < 2:
            raise DataError(f"All training images have the label '{found[0]}': a classifier needs two or more.")
        names = known if flags.model_name_or_path and set(found) <= set(known) else found
        if names != found:
            train = renumbered(train, found, names)
    else:
        names = known
        if flags.do_eval and not own:
            train, _ = load(flags, "train", names)
    if flags.do_eval and own:
        evaluation, _ = load(flags, "validation", names)
    elif flags.do_eval:
        train, evaluation = split_images(train, percentage=flags.validation_split_percentage)
    if flags.do_predict:
        test, _ = load(flags, "test", names, labelled=False)
        if flags.max_predict_samples is not None:
            test = test.select(range(min(flags.max_predict_samples, len(test))))
    train = some(train, flags.max_train_samples) if flags.do_train else None
    return Images(names, train, some(evaluation, flags.max_eval_samples), test)


def names_of(config: Any) -> list[str]:
    """Return the labels of a config by number, with their number where several are called the same."""
    names = [str(config.id2label.get(number, f"LABEL_{number}")) for number in range(config.num_labels)]
    counts = Counter(names)
    return [f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(names)]


def load(
    flags: ImageClassificationFlags, split: str, names: Sequence[str] | None = None, *, labelled: bool = True
) -> tuple[Any, list[str]]:
    """Return the images of the folder, the file or the split, and the names of their labels."""
    columns = Columns(flags.image_column_name, flags.label_column_name, labelled)
    local = getattr(flags, f"{split}_dir") or getattr(flags, f"{split}_file")
    if local:
        return load_images(local, names=names, columns=columns)
    if flags.dataset_name is None:
        raise UsageError(f"There are no images: give --{split}_dir, --{split}_file or --dataset_name.")
    return load_hub_images(
        flags.dataset_name,
        config_name=flags.dataset_config_name,
        split=split,
        names=names,
        columns=columns,
        cache_dir=flags.cache_dir,
        token=flags.hub_token,
    )


def _has(flags: ImageClassificationFlags, split: str) -> bool:
    if getattr(flags, f"{split}_dir") or getattr(flags, f"{split}_file"):
        return True
    return flags.dataset_name is not None and split in split_names(
        flags.dataset_name, config_name=flags.dataset_config_name, token=flags.hub_token
    )


def renumbered(dataset: Any, old: Sequence[str], new: Sequence[str]) -> Any:
    """Return the rows with labels that count in `new` what they counted in `old`."""
    places = [new.index(name) for name in old]
    labels = [places[label] for label in dataset["label"][:]]
    return dataset.remove_columns("label").add_column("label", labels)


def some(dataset: Any, count: int | None) -> Any:
    """Return at most `count` rows from all over the set, whose rows may stand class by class."""
    if dataset is None or count is None or count >= len(dataset):
        return dataset
    return dataset.select(np.sort(np.argsort(row_keys(np.arange(len(dataset))), kind="stable")[:count]))


def make_batches(
    flags: ImageClassificationFlags, dataset: Any, preprocess: Preprocess, rows: int, *, train: bool
) -> Batches:
    """Return batches of `rows` images."""
    return Batches(
        dataset,
        collate=collation(flags, preprocess, train=train),
        batch_size=rows,
        seed=flags.seed,
        shuffle=train,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def collation(flags: ImageClassificationFlags, preprocess: Preprocess, *, train: bool) -> ImageCollate:
    """Return what makes batches of images."""
    threads = flags.preprocessing_num_workers or min(os.cpu_count() or 1, _MOST_THREADS)
    augment = flags.augment() if train else None
    return ImageCollate(augment, flags.seed, preprocess.mark, preprocess, threads)


def made_images(preprocess: Preprocess) -> pa.Table:
    """Return rows of empty images, as `load_images` makes them, to see what a batch is like."""
    file = io.BytesIO()
    Image.new("L" if preprocess.channels == 1 else "RGB", preprocess.size[::-1]).save(file, "PNG")
    images = [{"bytes": file.getvalue(), "path": None}] * 2
    return pa.table({"image": images, "place": ["made"] * 2, "label": pa.array([0, 0], pa.int64())})


# Model and processor.


def prepare_model(flags: ImageClassificationFlags, config: Any, names: Sequence[str]) -> tuple[Any, Preprocess]:
    """Return the model for these labels, and what makes its pixels."""
    channels = getattr(config, "num_channels", None)
    if channels not in MODES:
        raise UsageError(
            f"The model takes images of {channels} channels, and image files give 1 or 3: change the config."
        )
    sized = hasattr(config, "image_size")
    preprocess = Preprocess(_processor(flags, config, channels), channels=channels)
    size = preprocess.size[0] if preprocess.size[0] == preprocess.size[1] else list(preprocess.size)
    if sized and flags.model_name_or_path is None:
        config.image_size = size
    _set_labels(flags, config, names)
    model = recipe.load_model(
        FlaxAutoModelForImageClassification,
        flags,
        config,
        seed=flags.seed,
        token=flags.hub_token,
        ignore_mismatched_sizes=flags.ignore_mismatched_sizes,
    )
    if sized and pair_of(config.image_size) != preprocess.size:
        logger.info("Positions are resized from images of %s to %s pixels.", config.image_size, size)
        model.resize_positions(preprocess.size)
    return model, preprocess


def _set_labels(flags: ImageClassificationFlags, config: Any, names: Sequence[str]) -> None:
    """Write the labels into the config; a head of other labels is replaced only where that is asked for."""
    known = names_of(config)
    if known == list(names):
        return
    if check_head(flags, config, known, names, head="ForImageClassification"):
        logger.warning("The head that knew %s learns %s from where it stands.", listed(known, 3), listed(names, 3))
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}


def _processor(flags: ImageClassificationFlags, config: Any, channels: int) -> Any:
    """Return the processor that the flags name, or one for a model from scratch."""
    name = flags.image_processor_name or flags.model_name_or_path
    if name is None and flags.config_name and (resolve(flags.config_name, weights=False) / FILE).is_file():
        name = flags.config_name
    if name is None:
        side: Any = flags.image_size or getattr(config, "image_size", IMAGE_SIZE)
        height, width = pair_of(side)
        return new_image_processor(height=height, width=width, channels=channels)
    revision = flags.model_revision if name == flags.model_name_or_path else None
    processor = open_image_processor(resolve(name, weights=False, token=flags.hub_token, revision=revision))
    return processor if flags.image_size is None else with_size(processor, flags.image_size)


def with_size(processor: Any, side: int) -> Any:
    """Return the processor for images of `side` times `side` pixels; what is cut off keeps its share."""
    values: dict[str, Any] = processor.to_dict()
    size = values.get("size") or {}
    crop = (values.get("do_center_crop") and values.get("crop_size")) or {}
    before = crop.get("height") or size.get("height") or size.get("shortest_edge") or side
    scaled = {name: max(1, round(value * side / before)) for name, value in size.items() if value}
    changes = {"size": scaled or {"height": side, "width": side}}
    if "height" in scaled and not crop:
        changes["size"] = {"height": side, "width": side}
    if crop:
        changes["crop_size"] = {"height": side, "width": side}
    return type(processor)(**{**values, **changes})
