"""Flags that the recipes of fine-tuning share."""

import math
from dataclasses import dataclass

from distaff.core.errors import UsageError
from distaff.tasks._flags import ModelFlags, TrainingFlags, check_dtypes, check_positive, flag

PREDICTION_FORMATS = ("csv", "jsonl")


@dataclass(kw_only=True)
class FinetuneFlags(ModelFlags, TrainingFlags):
    """What every recipe of fine-tuning takes, of texts and of images."""

    dataset_name: str | None = flag(None, "Dataset of the Hub, or a folder that save_to_disk wrote.")
    dataset_config_name: str | None = flag(None, "Configuration of the dataset.")
    max_train_samples: int | None = flag(None, "Use at most so many training rows.")
    max_eval_samples: int | None = flag(None, "Use at most so many evaluation rows.")
    max_predict_samples: int | None = flag(None, "Predict for at most so many rows.")
    preprocessing_num_workers: int | None = flag(None, "Processes for preparing the data.")
    do_predict: bool = flag(False, "Predict for the test data.")
    predictions_format: str = flag("csv", "Of the file of predictions: csv or jsonl.")
    label_smoothing_factor: float = flag(0.0, "Part of the target that is spread over all classes, in training.")
    freeze: list[str] = flag(
        [], "Modules that are not trained, by their paths or the ends of them: embeddings encoder/0.", nargs="+"
    )
    load_best_model_at_end: bool = flag(False, "Keep the parameters of the best evaluation, not the last ones.")
    metric_for_best_model: str | None = flag(None, "What the best is told by, by default the task's main figure.")
    greater_is_better: bool | None = flag(
        None, "Whether more is better, by default unless the figure is a loss.", nargs="?", const=True
    )
    early_stopping_patience: int | None = flag(None, "Stop after so many evaluations without a better one.")
    early_stopping_threshold: float = flag(0.0, "How much better that must be.")

    def check(self) -> None:
        """Raise `UsageError` for values that neither a training nor an evaluation can have."""
        self.check_numbers()
        check_dtypes(self)
        check_positive(
            self,
            "max_train_samples max_eval_samples max_predict_samples preprocessing_num_workers early_stopping_patience",
        )
        if self.predictions_format not in PREDICTION_FORMATS:
            raise UsageError(f"--predictions_format '{self.predictions_format}' is neither csv nor jsonl.")

    def check_selection(self) -> None:
        """Raise `UsageError` for values of a training, and for flags without effect."""
        if not 0 <= self.label_smoothing_factor < 1:
            raise UsageError(
                f"--label_smoothing_factor is {self.label_smoothing_factor}: it must be at least 0 and less than 1."
            )
        if not 0 <= self.early_stopping_threshold < math.inf:
            raise UsageError(f"--early_stopping_threshold is {self.early_stopping_threshold}: it must be 0 or more.")
        if self.early_stopping_patience is None and self.early_stopping_threshold:
            raise UsageError("--early_stopping_threshold needs --early_stopping_patience: give both.")
        for name in ("metric_for_best_model", "greater_is_better"):
            if getattr(self, name) is not None and not (self.load_best_model_at_end or self.early_stopping_patience):
                raise UsageError(
                    f"--{name} chooses nothing: give --load_best_model_at_end or --early_stopping_patience too."
                )

    def has_evaluation(self) -> bool:
        """Tell whether the flags name data to evaluate on."""
        return bool(self.dataset_name)


@dataclass(kw_only=True)
class FinetuneTextFlags(FinetuneFlags):
    """What recipes on texts take besides."""

    train_file: str | None = flag(None, "Rows to train on; commas and globs.")
    validation_file: str | None = flag(None, "Rows to evaluate on.")
    test_file: str | None = flag(None, "Rows to predict for; labels may be absent.")
    validation_split_percentage: int = flag(5, "Percent of the training rows to evaluate on if there are no others.")
    max_seq_length: int | None = flag(None, "Tokens a row at most, by default what the model allows, at most 512.")
    pad_to_max_length: bool = flag(False, "Pad every row to --max_seq_length, not to the nearest of a few lengths.")
    group_by_length: bool = flag(True, "Put rows of similar lengths together, so that short ones are padded little.")
    overwrite_cache: bool = flag(False, "Tokenise again although it is cached.")

    def check(self) -> None:
        """Raise `UsageError` for values that neither a training nor an evaluation can have."""
        super().check()
        check_positive(self, "max_seq_length")

    def has_evaluation(self) -> bool:
        """Tell whether the flags name data to evaluate on."""
        return bool(self.validation_file or self.train_file or self.dataset_name)
