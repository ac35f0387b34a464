"""The steps that every recipe shares: model and tokenizer by the flags, the plan, and what is written at the end."""

import contextlib
import difflib
import logging
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from distaff.core.errors import CheckpointError, DistaffError, UsageError
from distaff.core.mesh import batch_devices, parse_mesh
from distaff.core.processes import is_first, wait_for_all
from distaff.hub import open_tokenizer, push_folder, resolve, write_card
from distaff.models import FAMILIES
from distaff.models._family import check_values
from distaff.pretrained import FlaxPreTrainedModel
from distaff.tasks import _folder
from distaff.tasks._flags import SECRET_FLAGS, ModelFlags, TrainingFlags, checkpointing
from distaff.tasks._overrides import override
from distaff.tasks.tokenizer import save_tokenizer
from distaff.train import FitResult
from distaff.train.checkpoint import complete_steps
from distaff.train.exhausted import memory_errors
from distaff.train.resume import CHECKPOINTS, IF_ANY

logger = logging.getLogger("distaff")

# The mesh of models that are shapes and hold no parameters; None where models are loaded.
_SHAPES_ON: ContextVar[Mesh | None] = ContextVar("shapes_on", default=None)

# Lengths that are not said: a tokenizer without a limit says 10^30.
LONGEST_BY_DEFAULT = 512


def load_tokenizer(flags: ModelFlags, token: str | None = None):
    """Return the tokenizer that the flags name."""
    name = flags.tokenizer_name or flags.model_name_or_path or flags.config_name
    if name is None:
        raise UsageError(
            "There is no tokenizer: give --tokenizer_name, or --model_name_or_path of a checkpoint that has one; "
            "'distaff tokenizer train' makes one."
        )
    folder = resolve(name, weights=False, token=token, revision=flags.model_revision)
    return open_tokenizer(folder)


def load_config(flags: ModelFlags, tokenizer, token: str | None = None):
    """Return the config that the flags describe; one from a model type alone takes the tokenizer's vocabulary.

    `tokenizer` is None for models without words, and where the config's own vocabulary is meant.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    name = flags.config_name or flags.model_name_or_path
    if name is not None:
        folder = resolve(name, weights=False, token=token, revision=flags.model_revision)
        try:
            config = AutoConfig.from_pretrained(folder)
        except Exception as error:  # each config class raises its own
            raise CheckpointError(f"'{name}' holds no config that opens: {_first_line(error)}.") from error
    elif flags.model_type is None:
        raise UsageError("There is no model: give --model_name_or_path, --config_name or --model_type.")
    else:
        check_model_type(flags.model_type)
        config = CONFIG_MAPPING[flags.model_type]()
        if tokenizer is not None:
            fit_config_to_tokenizer(config, tokenizer)
    if flags.config_overrides:
        override(config, flags.config_overrides)
    check_values(type(config).__name__, config.to_dict())
    return config


def check_model_type(name: str) -> None:
    """Raise `UsageError` for a model type that no config is known for."""
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        near = difflib.get_close_matches(name, CONFIG_MAPPING, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"distaff has models of {', '.join(FAMILIES)}."
        raise UsageError(f"--model_type '{name}' is no model type of Transformers: {hint}")


def fit_config_to_tokenizer(config, tokenizer) -> None:
    """Set the vocabulary and the special ids of a new config to the tokenizer's."""
    config.vocab_size = len(tokenizer)
    old_eos = getattr(config, "eos_token_id", None)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(tokenizer, name) is not None:
            setattr(config, name, getattr(tokenizer, name))
    if getattr(config, "is_encoder_decoder", False):
        # BART's decoder starts from the eos token, T5's from the padding.
        for name in ("decoder_start_token_id", "forced_eos_token_id"):
            if getattr(config, name, None) is not None and getattr(config, name) == old_eos:
                setattr(config, name, config.eos_token_id)
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id


def mesh_of(flags: ModelFlags) -> Mesh:
    """Return the mesh that the flags describe."""
    return parse_mesh(flags.mesh)


@contextlib.contextmanager
def shapes_only(mesh: Mesh) -> Iterator[None]:
    """Make `load_model` return models on `mesh` that hold no parameters, as the config alone describes them."""
    before = _SHAPES_ON.set(mesh)
    try:
        yield
    finally:
        _SHAPES_ON.reset(before)


def load_model(
    auto_class,
    flags: ModelFlags,
    config,
    *,
    seed: int,
    token: str | None = None,
    ignore_mismatched_sizes: bool = False,
) -> Any:
    """Return the model with the checkpoint's weights, or random ones."""
    shapes_on = _SHAPES_ON.get()
    settings: dict[str, Any] = {
        "dtype": flags.dtype,
        "param_dtype": flags.param_dtype,
        "seed": seed,
        "mesh": mesh_of(flags) if shapes_on is None else shapes_on,
        "gradient_checkpointing": checkpointing(flags),
    }
    if flags.scan_layers:
        settings["scan_layers"] = True  # not every model has it
    if flags.attn_implementation != "auto":
        settings["attn_implementation"] = flags.attn_implementation  # nor this
    if shapes_on is not None:
        return auto_class.from_config(config, _do_init=False, **settings)
    with memory_errors("the model"):
        if flags.model_name_or_path is None:
            return auto_class.from_config(config, **settings)
        return auto_class.from_pretrained(
            flags.model_name_or_path,
            config=config,
            revision=flags.model_revision,
            token=token,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            **settings,
        )


def row_length(flags: Any, tokenizer, longest: int) -> int:
    """Return the tokens a row, which neither the model nor the flags exceed."""
    if flags.max_seq_length is not None:
        if flags.max_seq_length > longest:
            raise UsageError(
                f"--max_seq_length {flags.max_seq_length} is more than the {longest} positions of the model: lower it."
            )
        return flags.max_seq_length
    return min(tokenizer.model_max_length, longest, LONGEST_BY_DEFAULT)


def check_vocabulary(tokenizer, config) -> None:
    """Raise `UsageError` where the tokenizer, if there is one, has ids that the model has not."""
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"The tokenizer has {len(tokenizer)} tokens and the model a vocab_size of {config.vocab_size}: take the "
            "tokenizer of the model, or a larger vocab_size in the config."
        )


@dataclass(frozen=True)
class Plan:
    """How many rows a step takes, and how many steps there are."""

    train_rows: int
    eval_rows: int
    total_steps: int

    def log(self, flags: TrainingFlags, mesh: Mesh) -> None:
        """Say in one sentence what a step consists of."""
        logger.info(
            "A step takes %d rows: %d a device x %d device(s) x %d micro-batch(es); %d steps.",
            self.train_rows,
            flags.per_device_train_batch_size,
            batch_devices(mesh),
            flags.gradient_accumulation_steps,
            self.total_steps,
        )


def rows_a_step(flags: TrainingFlags, mesh: Mesh) -> tuple[int, int]:
    """Return the rows of a global training batch and of an evaluation batch."""
    devices = batch_devices(mesh)
    train = flags.per_device_train_batch_size * devices * flags.gradient_accumulation_steps
    return train, flags.per_device_eval_batch_size * devices


def count_steps(flags: TrainingFlags, steps_per_epoch: int) -> int:
    """Return the optimizer steps of a run over data of that length."""
    return flags.max_steps if flags.max_steps > 0 else max(1, math.ceil(flags.num_train_epochs * steps_per_epoch))


def measured(result: FitResult, folder: Path) -> dict[str, float]:
    """Return the figures of the last step of a run; where it was done before, those that stand in its log."""
    if result.metrics:
        return dict(result.metrics)
    logger.info("All %d steps were done before; the model is written again.", result.step)
    return _folder.logged_at(folder, result.step)


def log_start(flags: ModelFlags, training: TrainingFlags) -> None:
    """Say where the weights come from, in the order in which sources are tried."""
    resume = training.resume_from_checkpoint
    if resume == IF_ANY:
        resume = "newest" if complete_steps(Path(str(training.output_dir)) / CHECKPOINTS) else None
    sources = [
        (resume == "newest", f"1. the newest complete checkpoint of {training.output_dir}"),
        (resume is not None, f"2. the checkpoint {resume}"),
        (flags.model_name_or_path is not None, f"3. the pretrained weights of {flags.model_name_or_path}"),
        (True, f"4. random weights of seed {training.seed}"),
    ]
    logger.info("Initialisation: %s.", next(text for holds, text in sources if holds))


def finish(
    folder: Path,
    flags: Any,
    *,
    model: FlaxPreTrainedModel,
    params: Any,
    tokenizer,
    task: str | None,
    metrics: dict[str, float],
    step: int,
    shown: Sequence[str] | None = None,
) -> None:
    """Write model, tokenizer, results and card, and publish them where asked; the model, which costs most, first.

    Every process calls this, for none may hold all parameters; the first writes, and all leave when it has.

    `metrics` are those of step `step`, with `eval_...` among them. `shown`: which figures of evaluations stand in the
    card's log, by default all. Publishing that fails leaves the run whole.
    """
    evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    trained = {name: value for name, value in metrics.items() if name not in evaluated}
    try:
        model.save_pretrained(folder, params)
        if not is_first():
            wait_for_all()
            return
        if hasattr(tokenizer, "add_special_tokens"):
            save_tokenizer(tokenizer, folder)
        else:
            tokenizer.save_pretrained(folder)  # a processor of images
        _folder.write_results(folder, {"train": {**trained, "train_steps": step}, "eval": evaluated})
    except OSError as error:
        raise DistaffError(
            f"The model cannot be written to '{folder}' ({error.strerror or error}): make room and go on with "
            "--resume_from_checkpoint."
        ) from error
    write_card(
        folder,
        model_name=(flags.hub_model_id or folder.name).rpartition("/")[2],
        model_type=model.config.model_type,
        task=task,
        repo_id=flags.hub_model_id,
        base_model=flags.model_name_or_path,
        datasets=[flags.dataset_name] if flags.dataset_name else [],
        metrics={name.removeprefix("eval_"): value for name, value in evaluated.items()},
        command=command_line(flags),
        hyperparameters=_hyperparameters(flags),
        training_log=_logged(folder, shown),
        versions={name: version(name) for name in ("distaff", "jax", "flax", "optax", "transformers", "datasets")},
    )
    if flags.push_to_hub:
        publish(folder, flags)
    wait_for_all()


def publish(folder: Path, flags: TrainingFlags) -> None:
    """Push the folder; without token or network, say how to do it later."""
    try:
        address = push_folder(
            folder, flags.hub_model_id or folder.name, token=flags.hub_token, private=flags.hub_private_repo
        )
        logger.info("Published at %s", address)
    except DistaffError as error:
        # The last line of the run, so that the command in it is what the user sees.
        logger.error("Everything is saved in %s, but not published. %s", folder, error)


def command_line(flags: Any) -> str:
    """Return the command of this run as it can be typed again, without the token."""
    text = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    # By value: a flag may be spelled in several ways.
    for secret in filter(None, (getattr(flags, name) for name in SECRET_FLAGS)):
        text = text.replace(shlex.quote(secret), "...").replace(secret, "...")
    return text


def _hyperparameters(flags: TrainingFlags) -> dict[str, Any]:
    names = (
        "learning_rate per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps seed "
        "weight_decay max_grad_norm lr_scheduler_type warmup_steps num_train_epochs max_steps dtype param_dtype "
        "ema_decay"
    )
    optimizer = flags.optimizer_config()
    values = {"optimizer": optimizer.name, **optimizer.read()}
    values |= {name: getattr(flags, name) for name in names.split()}
    return {name: value for name, value in values.items() if value is not None}


def _logged(folder: Path, shown: Sequence[str] | None) -> list[dict[str, Any]]:
    rows = _folder.log_rows(folder)
    evaluated = [row for row in rows if any(name.startswith("eval_") for name in row)] or rows
    names = list(dict.fromkeys(name for row in evaluated for name in row if name.startswith("eval_")))
    if shown is not None:
        names = [name for name in names if name.removeprefix("eval_") in shown]
    names = ["step", "epoch", "loss", *names]
    return [{name: _number(row[name]) for name in names if name in row} for row in evaluated]


def _number(logged: float | None) -> float:
    """Return a number of the log, which has null for what is not finite."""
    return math.nan if logged is None else logged


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
