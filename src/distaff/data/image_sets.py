"""Labelled images: folders of classes, files of paths and labels, sets of the Hub.

All of them become a dataset with the columns "image" (`{"bytes", "path"}`, one of them null), "label" (the number of
the label, -1 where there is none) and "place" (what to call the row in an error). Nothing is decoded here.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.draws import row_keys
from distaff.data.files import READERS, expand_files, place_word
from distaff.data.image_modes import check_header, suffixes

logger = logging.getLogger(__name__)

# Columns that are taken where none is named, in this order.
IMAGE_COLUMNS = "image img pixel_values image_path path file_name filename file".split()
LABEL_COLUMNS = "label labels class category fine_label".split()
# Folders of a whole data set, which are no classes.
_SPLITS = {"train", "training", "validation", "valid", "val", "test", "eval", "dev"}
_FEATURES = datasets.Features(
    {
        "image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
        "label": datasets.Value("int64"),
        "place": datasets.Value("string"),
    }
)


@dataclass(frozen=True)
class Named:
    """An image and its label by name, None for an image without one; `place` says where both are said."""

    path: Path
    label: str | None
    place: str


@dataclass(frozen=True)
class Columns:
    """The columns of images and labels; None for one of the usual names."""

    image: str | None = None
    label: str | None = None
    labelled: bool = True

    def select(self, record: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """Return the columns to read, seen on one record; the label's is left out where it need not be there."""
        chosen = []
        for what, name, usual in (("image", self.image, IMAGE_COLUMNS), ("label", self.label, LABEL_COLUMNS)):
            found = name if name in record else next((each for each in usual if each in record and not name), None)
            if found is not None:
                chosen.append(found)
            elif what == "image" or self.labelled or name is not None:
                wanted = f"'{name}'" if name else "of a usual name"
                raise DataError(
                    f"{where}: no column {wanted} for the {what}, only "
                    f"{listed(record) or 'none'}; name one by --{what}_column_name."
                )
        return tuple(chosen)


def load_images(
    source: str | os.PathLike | Sequence[str],
    *,
    names: Sequence[str] | None = None,
    columns: Columns | None = None,
) -> tuple[datasets.Dataset, list[str]]:
    """Return the images of a folder or of files (.csv, .jsonl, .json, .parquet), and the names of their labels.

    In a folder each folder is a class. In files, paths are relative to the file's folder. With `names`, a label that is
    none of them is refused; without, they are those found, in order (of numbers, where all are whole numbers). Where
    `columns` say that labels need not be, images may lie anywhere in the folder, and an unknown label is none.

    Raises `DataError`, which names file and row, for what is missing, empty, no image or without a label.
    """
    columns = Columns() if columns is None else columns
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        rows = list(_class_folders(Path(source)) if columns.labelled else _flat_folder(Path(source)))
    else:
        rows = [row for path in expand_files(source) for row in _listed_rows(path, columns)]  # type: ignore[arg-type]
    if not rows:
        raise DataError(f"'{source}' names no image: there is nothing to read.")
    names = label_names(row.label for row in rows if row.label is not None) if names is None else list(names)
    numbers = {name: number for number, name in enumerate(names)}
    if columns.labelled:
        _check_labels(rows, numbers)
    _check_files(rows)
    table = {
        "image": [{"bytes": None, "path": str(row.path)} for row in rows],
        "label": [-1 if row.label is None else numbers.get(row.label, -1) for row in rows],
        "place": [str(row.path) for row in rows],
    }
    return datasets.Dataset.from_dict(table, features=_FEATURES), list(names)


def label_names(labels: Iterable[str]) -> list[str]:
    """Return each label once, in the order of numbers where all are whole ones, else of letters."""
    found = set(labels)
    numbers = all(name.removeprefix("-").isdecimal() for name in found)
    return sorted(found, key=lambda name: (int(name), name) if numbers else (0, name))


def split_images(dataset: datasets.Dataset, *, percentage: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return (train, validation): of each class about `percentage` % validate, the same ones at every call.

    A class of one image is trained on. Raises `DataError` where no image could be spared.
    """
    if not 0 < percentage < 100:
        raise UsageError(f"--validation_split_percentage is {percentage}: it must be between 1 and 99.")
    labels, keys = np.asarray(dataset["label"][:]), row_keys(np.arange(len(dataset)))
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = min(len(rows) - 1, max(1, round(len(rows) * percentage / 100)))
        chosen[rows[np.argsort(keys[rows], kind="stable")[:count]]] = True
    if not chosen.any():
        raise DataError(
            f"{len(labels)} image(s), one a class, cannot be split for validation: give --validation_dir or "
            "--validation_file, or --do_eval False."
        )
    return dataset.select(np.flatnonzero(~chosen)), dataset.select(np.flatnonzero(chosen))


# Folders.


def _class_folders(root: Path) -> Iterator[Named]:
    classes, passed_over = [path for path in _visible(root) if path.is_dir()], []
    outside = [path for path in _visible(root) if path.is_file() and path.suffix.lower() in suffixes()]
    if not classes:
        raise DataError(f"'{root}' holds no folders: put the images of each class into a folder of the class's name.")
    if {path.name.lower() for path in classes} <= _SPLITS:
        raise DataError(
            f"'{root}' holds the folders {listed(path.name for path in classes)}, which are no classes: name one of "
            f"them, such as '{classes[0]}'."
        )
    if outside:
        raise DataError(f"'{outside[0]}' ({len(outside)} in all) lies in no class's folder: move or remove it.")
    empty = []
    for folder in classes:
        found = 0
        for path in _files_below(folder):
            if path.suffix.lower() in suffixes():
                found += 1
                yield Named(path, folder.name, str(path))
            else:
                passed_over.append(path)
        if not found:
            empty.append(str(folder))
    if empty:
        raise DataError(f"The class folder '{listed(empty)}' holds no image: remove it, or put images into it.")
    _say_passed_over(passed_over)


def _flat_folder(root: Path) -> Iterator[Named]:
    passed_over = []
    for path in _files_below(root):
        if path.suffix.lower() in suffixes():
            inside = path.relative_to(root).parts
            yield Named(path, inside[0] if len(inside) > 1 else None, str(path))
        else:
            passed_over.append(path)
    _say_passed_over(passed_over)


def _say_passed_over(paths: list[Path]) -> None:
    if paths:
        logger.warning("%d file(s) are no images by their names and passed over: %s.", len(paths), listed(paths, 3))


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"'{folder}' cannot be read: {error.strerror}.") from error


def _files_below(folder: Path) -> Iterator[Path]:
    for path in _visible(folder):
        if path.is_dir():
            yield from _files_below(path)
        else:
            yield path


# Files of paths.


def _listed_rows(path: Path, columns: Columns) -> Iterator[Named]:
    if path.suffix.lower() == ".txt":
        raise UsageError(f"'{path}' is plain text: images and labels stand in .csv, .jsonl, .json or .parquet.")
    try:
        for number, values in READERS[path.suffix.lower()](
            path, lambda record, where: columns.select(record, f"{path}, {where}")
        ):
            if values is None:
                continue
            yield _named(path, f"{path}, {place_word(path)} {number}", *values)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error


def _named(file: Path, place: str, image: Any, label: Any = None) -> Named:
    if not isinstance(image, str) or not image.strip():
        raise DataError(f"{place}: the image is {image!r} and must be a path: correct or remove the row.")
    if image.startswith(("http://", "https://")):
        raise DataError(f"{place}: '{image}' is an address: download the images first.")
    path = Path(image).expanduser()
    return Named(path if path.is_absolute() else file.parent / path, as_name(label), place)


def as_name(label: Any) -> str | None:
    """Return the name of a label, None for null and blank ones."""
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # as pandas writes a column that has a gap
    return None if label is None else str(label).strip() or None


# Checks.


def _check_labels(rows: Sequence[Named], numbers: Mapping[str, int]) -> None:
    for row in rows:
        if row.label is None:
            raise DataError(f"{row.place}: no label: write one, or remove the row.")
        if row.label not in numbers:
            raise DataError(
                f"{row.place}: the label '{row.label}' is none of the model's {len(numbers)}: {listed(numbers)}."
            )


def _check_files(rows: Sequence[Named]) -> None:
    """Raise `DataError` that names all files that are missing or do not begin as an image."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        faults = [(row, fault) for row, fault in zip(rows, pool.map(check_header, (row.path for row in rows))) if fault]
    if faults:
        which = listed(
            (
                f"'{row.path}' ({fault}{'' if row.place == str(row.path) else f'; {row.place}'})"
                for row, fault in faults
            ),
            5,
        )
        raise DataError(
            f"{len(faults)} of {len(rows)} files are no images that can be read: {which}; replace or remove them."
        )
