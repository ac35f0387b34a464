"""What the labels of a set are to a model: names of classes and their ids, or numbers.

Labels are read as they are written. Where all are numbers and one of them is not written as a whole one (0.5, 1.0,
1e3), they are numbers; else each is the name of a class, so that `1` and `"1"` are the same one. A checkpoint whose
names cover those of the data keeps its classes; one without names of its own (LABEL_0) and data of whole numbers mean
ids.
"""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.labelled import Labelled

logger = logging.getLogger("distaff")

REGRESSION, CLASSIFICATION = "regression", "single_label_classification"
_GIVEN_NAME = re.compile(r"LABEL_\d+")
_WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Labels:
    """The classes by id, none where labels are numbers."""

    names: tuple[str, ...]

    @property
    def regression(self) -> bool:
        """Whether labels are numbers."""
        return not self.names

    def put_into(self, config: Any) -> None:
        """Write them into a model's config."""
        names = self.names or ("LABEL_0",)
        config.id2label = dict(enumerate(names))
        config.label2id = {name: index for index, name in enumerate(names)}
        config.problem_type = REGRESSION if self.regression else CLASSIFICATION

    def targets(self, rows: Labelled) -> np.ndarray:
        """Return `[rows]` int32 ids or float32 numbers; -1 or nan where a row has no label.

        Raises `DataError` with the place of the first that there is not.
        """
        written = rows.labels()
        if self.regression:
            numbers = [math.nan if label is None else _number(label) for label in written]
            for index, number in enumerate(numbers):
                if number is None or math.isinf(number):
                    raise DataError(f"{rows.place(index)}: the label '{written[index]}' is not a number.")
            return np.array(numbers, np.float32)
        ids = {name: index for index, name in enumerate(self.names)}
        # Whole numbers are ids where no class is called so.
        ids = {str(index): index for index in range(len(self.names))} | ids if not _whole(self.names) else ids
        found = [-1 if label is None else ids.get(label) for label in written]
        if None in found:
            index = found.index(None)
            raise DataError(
                f"{rows.place(index)}: the label '{written[index]}' is none of the model's: {listed(self.names)}."
            )
        return np.array(found, np.int32)


def labels_of(config: Any, train: Labelled | None, problem_type: str | None) -> Labels:
    """Return the labels of a model with `config` that is trained on `train`, or as it is without."""
    own = tuple(config.id2label[index] for index in range(config.num_labels))
    if train is None:
        regression = (problem_type or config.problem_type) == REGRESSION or (
            problem_type is None and config.problem_type is None and config.num_labels == 1
        )
        if regression and config.num_labels != 1:
            raise UsageError(f"The model has {config.num_labels} classes: it gives no numbers.")
        return Labels(()) if regression else Labels(own)
    written = [label for label in train.labels() if label is not None]
    found = sorted(set(written), key=_order)
    if problem_type is None and train.names is None and _numbers(found):
        # So pandas writes ids of classes too, where a column has a gap.
        logger.info("Labels as %s are learnt as numbers; --problem_type %s makes classes.", found[0], CLASSIFICATION)
        problem_type = REGRESSION
    if problem_type == REGRESSION:
        return Labels(())
    names = train.names or tuple(found)
    if len(names) < 2:
        raise DataError(f"All training rows have the label '{names[0]}': a classifier needs two classes or more.")
    named = not all(_GIVEN_NAME.fullmatch(name) for name in own)
    if named and set(names) <= set(own):
        return Labels(own)
    if named:
        logger.warning("The checkpoint's classes (%s) are replaced by those of the data.", listed(own, 5))
    return Labels(names)


def _numbers(found: Sequence[str]) -> bool:
    """Tell whether all are numbers and not all of them whole; 'nan' is a gap among them and no name."""
    told = [label for label in found if label.lower() != "nan"]
    return all(_number(label) is not None for label in told) and not _whole(told)


def _whole(found: Sequence[str]) -> bool:
    return all(_WHOLE.fullmatch(label) for label in found)


def _number(label: str) -> float | None:
    try:
        number = float(label)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _order(label: str) -> tuple[Any, ...]:
    """Order whole numbers by their value, before names by their letters."""
    return (0, int(label), "") if _WHOLE.fullmatch(label) else (1, 0, label)
