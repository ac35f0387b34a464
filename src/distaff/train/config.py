"""The plain settings of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distaff.core.errors import UsageError
from distaff.train.average import check_decay
from distaff.train.best import Selection


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The plain settings of a run; steps are optimizer steps.

    total_steps: where the run ends. output_dir: for checkpoints and logs; None writes nothing.
    accumulation: micro-batches a step. seed: of the run's random key.
    log_every, eval_every, save_every: steps between; None for the last two: at the end only.
    eval_steps: how many evaluation batches there are. save_total_limit: how many checkpoints stay (None: all).
    resume: None, "newest", "if_any" (the newest, or the start where there is none), or a path.
    overwrite: an earlier run in output_dir is removed instead of refused.
    report_to: "tensorboard" and "wandb", besides the terminal and metrics.jsonl.
    steps_per_epoch: for the logged epoch. debug_nans: stop at the first NaN with the operation's name (slow).
    ema_decay: of the average of the parameters, which then is evaluated, compared and saved; None keeps none.
    progress: write to the terminal. selection: by what evaluations are compared, None to keep what the last step made.
    """

    total_steps: int
    output_dir: str | Path | None = None
    accumulation: int = 1
    seed: int = 0
    log_every: int = 50
    eval_every: int | None = None
    eval_steps: int = 0
    save_every: int | None = None
    save_total_limit: int | None = None
    resume: str | Path | None = None
    overwrite: bool = False
    report_to: Sequence[str] = ("tensorboard",)
    steps_per_epoch: float | None = None
    debug_nans: bool = False
    ema_decay: float | None = None
    progress: bool = True
    selection: Selection | None = None

    def __post_init__(self) -> None:
        for name in ("total_steps", "accumulation", "log_every", "eval_every", "save_every", "save_total_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        if self.total_steps >= 2**31:
            raise UsageError(f"total_steps is {self.total_steps}: steps are counted to {2**31 - 1}.")
        if self.selection is not None and self.selection.reload and self.output_dir is None:
            raise UsageError("A best step that is reloaded must be saved: give an output_dir.")
        check_decay(self.ema_decay)
        if self.eval_steps < 0:
            raise UsageError(f"eval_steps must be 0 or more, not {self.eval_steps}.")
