"""Training of functions and pytrees: it never sees a model or a dataset.

`fit` is the whole loop; `make_train_step`, `evaluate` and `Checkpoints` are its parts for a loop of one's own.
"""

from distaff.train.best import Best, Selection
from distaff.train.checkpoint import Checkpoints, read_params, restore
from distaff.train.collect import collect
from distaff.train.config import LoopConfig
from distaff.train.evaluate import evaluate
from distaff.train.loop import FitResult, fit
from distaff.train.metrics import StepMetrics, divide, perplexity
from distaff.train.optim import OptimizerConfig, make_optimizer, make_schedule
from distaff.train.state import TrainState, abstract_state, create_state
from distaff.train.step import debugging_nans, make_eval_step, make_train_step, place_rows

__all__ = [
    "Best",
    "Checkpoints",
    "FitResult",
    "LoopConfig",
    "OptimizerConfig",
    "Selection",
    "StepMetrics",
    "TrainState",
    "abstract_state",
    "collect",
    "create_state",
    "debugging_nans",
    "divide",
    "evaluate",
    "fit",
    "make_eval_step",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "perplexity",
    "place_rows",
    "read_params",
    "restore",
]
