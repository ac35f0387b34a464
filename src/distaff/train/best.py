"""Which evaluation of a run was the best, and whether to wait for a better one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distaff.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Selection:
    """By what evaluations are compared, and what follows from it.

    metric: its name in the log ("eval_accuracy"). greater_is_better: in which direction.
    patience: the run stops after so many evaluations in a row that are not better; None never does.
    threshold: by how much an evaluation must be better to be counted so by the patience.
    reload: the best step is saved, kept whatever `save_total_limit` says, and is what `fit` returns.
    """

    metric: str
    greater_is_better: bool = True
    patience: int | None = None
    threshold: float = 0.0
    reload: bool = True

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise UsageError(f"patience must be at least 1, not {self.patience}.")
        if not 0 <= self.threshold < math.inf:
            raise UsageError(f"threshold must be zero or more, not {self.threshold}.")


@dataclass
class Best:
    """The best evaluation so far.

    step: after which it took place, None before the first. metrics: all that was measured then.
    waited: evaluations since the last one that was better by the threshold.
    """

    selection: Selection
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    waited: int = 0

    def consider(self, step: int, values: Mapping[str, float]) -> bool:
        """Take in an evaluation and tell whether it is the best. One without a finite value is worse than any."""
        if self.selection.metric not in values:
            raise UsageError(
                f"There is no metric '{self.selection.metric}' to choose by: an evaluation has {', '.join(values)}."
            )
        gain = self._gain(values)
        self.waited = 0 if gain > self.selection.threshold else self.waited + 1
        if gain <= 0:
            return False
        self.step, self.metrics = step, dict(values)
        return True

    @property
    def exhausted(self) -> bool:
        """Whether the patience is at its end."""
        return self.selection.patience is not None and self.waited >= self.selection.patience

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"metric": self.selection.metric, "step": self.step, "metrics": metrics, "waited": self.waited}

    def take(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from what `to_json` returned; what was chosen by another metric says nothing."""
        if saved is None or saved["metric"] != self.selection.metric:
            return
        self.step, self.waited = saved["step"], saved["waited"]
        self.metrics = {name: math.nan if value is None else value for name, value in saved["metrics"].items()}

    def _gain(self, values: Mapping[str, float]) -> float:
        value = values[self.selection.metric]
        if not math.isfinite(value):
            return -math.inf
        if self.step is None:
            return math.inf
        difference = value - self.metrics[self.selection.metric]
        return difference if self.selection.greater_is_better else -difference
