"""Flags that recipes share, by the names of the old `run_*_flax.py` scripts, for `transformers.HfArgumentParser`."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from distaff.core.errors import UsageError
from distaff.core.precision import dtype_of
from distaff.train import LoopConfig, OptimizerConfig, Selection
from distaff.train.average import check_decay
from distaff.train.log import check_reporters, installed_reporters
from distaff.train.optim import check_optimizer

SECRET_FLAGS = ("hub_token",)
# What an evaluation has no use for: 'distaff eval' refuses it, and passes it over in the recipe.yaml of a training.
TRAINING_ONLY = frozenset(
    "model_type gradient_checkpointing print_placement overwrite_output_dir resume_from_checkpoint do_train "
    "per_device_train_batch_size gradient_accumulation_steps learning_rate weight_decay adam_beta1 adam_beta2 "
    "adam_epsilon adafactor optimizer sgd_momentum moment_dtype ema_decay "
    "max_grad_norm lr_scheduler_type warmup_steps num_train_epochs max_steps logging_steps "
    "eval_steps save_steps save_total_limit debug_nans report_to push_to_hub hub_model_id hub_private_repo "
    "max_train_samples streaming num_train_steps num_eval_samples shuffle_buffer_size preview "
    "label_smoothing_factor pack_texts freeze load_best_model_at_end metric_for_best_model greater_is_better "
    "early_stopping_patience early_stopping_threshold class_weights ignore_mismatched_sizes "
    "random_resized_crop min_crop_area horizontal_flip mixup_alpha".split()
)


def flag(default: Any, text: str, **argparse: Any) -> Any:
    """Return a dataclass field with a help text and further keywords of `add_argument`."""
    metadata = {"help": text.replace("%", "%%"), **argparse}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class ModelFlags:
    """Which model, from where."""

    model_name_or_path: str | None = flag(None, "Checkpoint to start from: a folder or a Hub id.")
    model_type: str | None = flag(None, "Model type for a model from scratch (bert, roberta, ...).")
    config_name: str | None = flag(None, "Config to use instead of the checkpoint's or the type's own.")
    tokenizer_name: str | None = flag(None, "Tokenizer to use instead of the checkpoint's.")
    config_overrides: str | None = flag(None, "Changes to the config: hidden_size=192,num_hidden_layers=4.")
    model_revision: str | None = flag(None, "Branch, tag or commit of the checkpoint on the Hub.")
    cache_dir: str | None = flag(None, "Where converted and tokenised data is kept.")
    dtype: str = flag("float32", "dtype of the computation: float32, bfloat16 or float16.")
    param_dtype: str = flag("float32", "dtype in which parameters are kept.")
    gradient_checkpointing: str = flag(
        "none",
        "What a layer computes again in the backward pass instead of keeping it: none, dots (all but the products with "
        "weights) or full, which is what the flag without a value means.",
        nargs="?",
        const="full",
    )
    scan_layers: bool = flag(False, "Compile one layer instead of all: faster to compile for deep models.")
    mesh: str | None = flag(
        None,
        "How devices share the work: data=2,fsdp=2,tensor=2, where -1 is the rest; by default all split the data.",
    )
    print_placement: bool = flag(False, "Print how each parameter lies on the mesh.")
    attn_implementation: str = flag(
        "auto",
        "How to attend: eager writes all scores out, blocks needs memory in proportion to the length, xla and cudnn "
        "are JAX's own, and auto chooses by length and device.",
    )


@dataclass(kw_only=True)
class TextSourceFlags:
    """Which texts."""

    dataset_name: str | None = flag(None, "Dataset of the Hub, or a folder that save_to_disk wrote.")
    dataset_config_name: str | None = flag(None, "Configuration of the dataset.")
    train_file: str | None = flag(None, "Texts to train on: .txt, .jsonl, .json, .csv or .parquet; commas and globs.")
    validation_file: str | None = flag(None, "Texts to evaluate on.")
    validation_split_percentage: int = flag(5, "Percent of the training texts to evaluate on if there are no others.")
    text_column: str | None = flag(None, "Column of the texts, by default 'text' or the first of strings.")
    preprocessing_num_workers: int | None = flag(None, "Processes for tokenising.")
    overwrite_cache: bool = flag(False, "Tokenise again although it is cached.")
    max_train_samples: int | None = flag(None, "Use at most so many training texts.")
    max_eval_samples: int | None = flag(None, "Use at most so many evaluation texts.")
    streaming: bool = flag(False, "Read texts as they come, without converting all of them first.")
    num_train_steps: int | None = flag(None, "Steps of a streamed run; the same as --max_steps.")
    num_eval_samples: int = flag(
        1_000,
        "With --streaming: so many first texts are evaluated on and never trained on; --max_eval_samples lowers it.",
    )
    shuffle_buffer_size: int = flag(1_000, "With --streaming: rows that are shuffled together.")

    def check_texts(self) -> None:
        """Raise `UsageError` for values that no texts can be read with."""
        check_positive(
            self,
            "preprocessing_num_workers max_train_samples max_eval_samples num_train_steps shuffle_buffer_size",
        )


@dataclass(kw_only=True)
class TextFlags(TextSourceFlags):
    """Which texts, in rows of how many tokens."""

    max_seq_length: int | None = flag(
        None, "Tokens a row, by default as many as tokenizer and model allow, at most 512."
    )

    def check_texts(self) -> None:
        """Raise `UsageError` for values that no texts can be read with."""
        super().check_texts()
        check_positive(self, "max_seq_length")


@dataclass(kw_only=True)
class TrainingFlags:
    """How to train, what to write and where."""

    output_dir: str | None = flag(None, "Folder for everything that the run writes.")
    overwrite_output_dir: bool = flag(False, "Start anew although the folder holds a run.")
    resume_from_checkpoint: str | None = flag(
        None,
        "Go on from this checkpoint; without a value from the newest of the folder; if_any: from it, if there is one.",
        nargs="?",
        const="newest",
    )
    do_train: bool = flag(True, "Train.")
    do_eval: bool = flag(True, "Evaluate, while training and after it.")
    per_device_train_batch_size: int = flag(8, "Rows a device and micro-batch.")
    per_device_eval_batch_size: int = flag(8, "Rows a device in evaluation.")
    gradient_accumulation_steps: int = flag(1, "Micro-batches a step.")
    optimizer: str | None = flag(
        None, "adamw (the default), adafactor, lion, sgd, sm3, or muon (layers' kernels; the rest is AdamW's)."
    )
    learning_rate: float = flag(5e-5, "Peak of the learning rate; Lion wants 3 to 10 times less, SGD and SM3 more.")
    weight_decay: float = flag(0.0, "Decoupled weight decay, not on biases and norms.")
    adam_beta1: float = flag(0.9, "AdamW, Lion, Muon's AdamW: decay of the first moment.")
    adam_beta2: float | None = flag(
        None, "AdamW, Lion, Muon's AdamW: decay of the second moment, by default 0.999 (Lion 0.99)."
    )
    adam_epsilon: float = flag(1e-8, "AdamW, Muon's AdamW: epsilon.")
    sgd_momentum: float = flag(0.9, "SGD: momentum; 0 for none.")
    moment_dtype: str | None = flag(
        None, "AdamW, Lion, SGD, Muon: float32 or bfloat16 for the first moment, by default as the parameters."
    )
    adafactor: bool = flag(False, "The same as --optimizer adafactor.")
    ema_decay: float | None = flag(
        None, "Evaluate, compare and save a moving average of the parameters, such as of 0.999; it starts as they do."
    )
    max_grad_norm: float = flag(1.0, "Scale gradients down to this global norm; 0 leaves them alone.")
    lr_scheduler_type: str = flag("linear", "linear, cosine, constant, constant_with_warmup or inverse_sqrt.")
    warmup_steps: int = flag(0, "Steps in which the learning rate rises to its peak.")
    num_train_epochs: float = flag(3.0, "Times through the data.")
    max_steps: int = flag(-1, "Steps, instead of epochs.")
    logging_steps: int = flag(50, "Steps between logs.")
    eval_steps: int | None = flag(None, "Steps between evaluations, by default an epoch.")
    save_steps: int = flag(500, "Steps between checkpoints.")
    save_total_limit: int | None = flag(None, "Keep only so many newest checkpoints.")
    seed: int = flag(42, "Seed of weights, order, masks and dropout.")
    debug_nans: bool = flag(False, "Stop at the first NaN with the operation's name; slow.")
    report_to: list[str] = flag(["tensorboard"], "tensorboard, wandb, all or none, besides terminal and metrics.jsonl.")
    push_to_hub: bool = flag(False, "Publish the folder at the end.")
    hub_model_id: str | None = flag(None, "Repository to publish to, by default the folder's name.")
    hub_token: str | None = flag(None, "Token of the Hub, by default the one that is logged in.")
    hub_private_repo: bool | None = flag(None, "Make the repository private.", nargs="?", const=True)

    def check_numbers(self) -> None:
        """Raise `UsageError` for values that neither a training nor an evaluation can have."""
        check_positive(
            self,
            "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps logging_steps "
            "save_steps eval_steps save_total_limit",
        )
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed is {self.seed}: it must lie between 0 and {2**32 - 1}.")

    def check_training(self) -> None:
        """Raise `UsageError` for values that no training can have."""
        self.check_numbers()
        if not math.isfinite(self.num_train_epochs):
            raise UsageError(f"--num_train_epochs is {self.num_train_epochs}: it must be a finite number.")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise UsageError("Nothing would be trained: give --num_train_epochs above 0 or --max_steps of at least 1.")
        if self.warmup_steps < 0:
            raise UsageError(f"--warmup_steps is {self.warmup_steps}: it must be at least 0.")
        check_optimizer(self.optimizer_config())
        check_decay(self.ema_decay)
        check_reporters(reporters(self.report_to))

    def optimizer_config(self) -> OptimizerConfig:
        """The optimizer that the flags describe."""
        return OptimizerConfig(
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_epsilon=self.adam_epsilon,
            sgd_momentum=self.sgd_momentum,
            moment_dtype=self.moment_dtype,
            adafactor=self.adafactor,
            warmup_steps=self.warmup_steps,
            lr_scheduler_type=self.lr_scheduler_type,
            max_grad_norm=self.max_grad_norm or None,
        )

    def loop(
        self,
        *,
        total_steps: int,
        steps_per_epoch: float | None,
        eval_batches: int,
        selection: Selection | None = None,
    ) -> LoopConfig:
        """The loop that the flags describe."""
        every_epoch = None if steps_per_epoch is None else max(1, round(steps_per_epoch))
        return LoopConfig(
            total_steps=total_steps,
            output_dir=self.output_dir,
            accumulation=self.gradient_accumulation_steps,
            seed=self.seed,
            log_every=self.logging_steps,
            eval_every=self.eval_steps or every_epoch,
            eval_steps=eval_batches,
            save_every=self.save_steps,
            save_total_limit=self.save_total_limit,
            resume=self.resume_from_checkpoint,
            overwrite=self.overwrite_output_dir,
            report_to=reporters(self.report_to),
            steps_per_epoch=steps_per_epoch,
            debug_nans=self.debug_nans,
            ema_decay=self.ema_decay,
            selection=selection,
        )


def check_positive(flags: Any, names: str) -> None:
    """Raise `UsageError` for the first of the named flags that is given and below 1."""
    for name in names.split():
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}: it must be at least 1.")


def reporters(names: list[str]) -> tuple[str, ...]:
    """Return where to report to: "all" (that are installed) and "none" resolved."""
    asked = [name for part in names for name in part.split(",")]
    if "none" in asked:
        return ()
    return installed_reporters() if "all" in asked else tuple(asked)


def checkpointing(flags: ModelFlags) -> str:
    """Return what `--gradient_checkpointing` says; recipes from before it had names hold a boolean."""
    said = flags.gradient_checkpointing
    return {"true": "full", "false": "none"}.get(said.lower(), said)


def check_dtypes(flags: ModelFlags) -> None:
    """Raise `UsageError` for dtypes that models do not have."""
    dtype_of(flags.dtype)
    dtype_of(flags.param_dtype)


def check_epsilon(model: ModelFlags, training: TrainingFlags) -> None:
    """Raise `UsageError` where AdamW, which computes in the parameters' dtype, would divide by zero."""
    has_epsilon = "adam_epsilon" in training.optimizer_config().read()
    if has_epsilon and not np.asarray(training.adam_epsilon).astype(dtype_of(model.param_dtype)):
        raise UsageError(
            f"--adam_epsilon {training.adam_epsilon} is zero in --param_dtype {model.param_dtype}: "
            "give a larger one, such as 1e-4."
        )


def as_recipe(flags: Any) -> dict[str, Any]:
    """Return the flags as plain values, without secrets, for `recipe.yaml`."""
    return {each.name: getattr(flags, each.name) for each in fields(flags) if each.name not in SECRET_FLAGS}
