"""Labelled images of a dataset of the Hub, or of a folder that `save_to_disk` wrote."""

import os
from collections.abc import Sequence
from typing import Any

import datasets

from distaff.core.errors import DataError, listed
from distaff.data.hub_text import load_split
from distaff.data.image_sets import Columns, as_name, label_names


def load_hub_images(
    name: str,
    *,
    config_name: str | None = None,
    split: str = "train",
    names: Sequence[str] | None = None,
    columns: Columns | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> tuple[datasets.Dataset, list[str]]:
    """Return the images of a split and the names of their labels, as `load_images` does."""
    columns = Columns() if columns is None else columns
    dataset = load_split(name, config_name=config_name, split=split, cache_dir=cache_dir, token=token)
    where = f"The split '{split}' of '{name}'"
    image, *label = columns.select(dict.fromkeys(dataset.column_names), where)
    if not isinstance(dataset.features[image], datasets.Image):
        raise DataError(
            f"{where}: column '{image}' holds {dataset.features[image]} and no images; name another by "
            "--image_column_name."
        )
    if len(dataset) == 0:
        raise DataError(f"{where} has no rows: there is nothing to read.")
    found = _label_column(dataset, label[0]) if label else [None] * len(dataset)
    if names is None:
        feature = dataset.features[label[0]] if label else None
        if isinstance(feature, datasets.ClassLabel):
            names = feature.names
        else:
            names = label_names(each for each in found if each is not None)
    numbers = {each: number for number, each in enumerate(names)}
    if columns.labelled:
        for row, each in enumerate(found):
            if each not in numbers:
                what = (
                    "no label"
                    if each is None
                    else f"the label '{each}' is none of the model's {len(names)}: {listed(names)}"
                )
                raise DataError(f"{where}, row {row}: {what}.")
    kept = dataset.cast_column(image, datasets.Image(decode=False)).select_columns([image])
    kept = kept if image == "image" else kept.rename_column(image, "image")
    kept = kept.add_column("label", [numbers.get(str(each), -1) for each in found])
    return kept.add_column("place", [f"{name}, {split} row {row}" for row in range(len(found))]), list(names)


def _label_column(dataset: datasets.Dataset, column: str) -> list[str | None]:
    feature: Any = dataset.features[column]
    values = dataset[column][:]
    if isinstance(feature, datasets.ClassLabel):
        # -1 stands for a label that is not told.
        return [None if value is None or value < 0 else feature.int2str(value) for value in values]
    return [as_name(value) for value in values]
