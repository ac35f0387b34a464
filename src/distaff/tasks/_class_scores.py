"""Figures of classes and numbers, by scikit-learn and scipy, over a whole set.

`f1` is that of the second class where there are two, as GLUE has it, else the mean over classes. A correlation of
constant values is not defined: nan, which becomes null where it is written.
"""

import logging

import numpy as np

from distaff.core.errors import MissingExtraError

logger = logging.getLogger("distaff")

CLASS_FIGURES = ("loss", "accuracy", "f1", "matthews_correlation")
NUMBER_FIGURES = ("loss", "mse", "pearson", "spearmanr")


def class_figures(logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return `CLASS_FIGURES` of `logits` `[rows, classes]` and ids `[rows]`."""
    try:
        from sklearn.metrics import f1_score, matthews_corrcoef
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "train", "F1") from error
    logits = logits.astype(np.float64)
    # Against infinities that a model in float16 may give, no figure is better than a wrong one: they stay.
    shifted = logits - logits.max(axis=1, keepdims=True)
    loss = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(targets)), targets]
    found = logits.argmax(axis=1)
    average = "binary" if logits.shape[1] == 2 else "macro"
    return {
        "loss": float(loss.mean()),
        "accuracy": float(np.mean(found == targets)),
        "f1": float(f1_score(targets, found, average=average, zero_division=0)),
        # Of one class alone it is 0 by its definition; scikit-learn says so with a warning.
        "matthews_correlation": float(matthews_corrcoef(targets, found)) if len({*targets, *found}) > 1 else 0.0,
    }


def number_figures(found: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return `NUMBER_FIGURES` of predicted and true numbers, both `[rows]`."""
    from scipy.stats import pearsonr, spearmanr

    found, targets = found.astype(np.float64), targets.astype(np.float64)
    error = float(np.mean((found - targets) ** 2))
    values = {"loss": error, "mse": error}
    reason = _undefined(found, targets)
    if reason is not None:
        logger.warning("There is no correlation: %s; it is written as null.", reason)
        return values | {"pearson": float("nan"), "spearmanr": float("nan")}
    return values | {
        "pearson": float(pearsonr(found, targets).statistic),
        "spearmanr": float(spearmanr(found, targets).statistic),
    }


def _undefined(found: np.ndarray, targets: np.ndarray) -> str | None:
    """Return why two series have no correlation, None where they have one."""
    if len(found) < 2:
        return "there are fewer than two rows"
    for name, values in (("predictions", found), ("labels", targets)):
        if np.all(values == values[0]):
            return f"the {name} are all the same"
    return None
