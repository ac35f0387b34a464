"""The steps that every recipe shares: model and tokenizer by the flags, the plan, and what is written at the end."""

import json
import logging
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.sharding import Mesh

from distaff.core.errors import CheckpointError, DistaffError, UsageError
from distaff.core.mesh import batch_devices
from distaff.hub import open_tokenizer, push_folder, resolve, write_card
from distaff.pretrained import FlaxPreTrainedModel
from distaff.tasks._flags import ModelFlags, TextFlags, TrainingFlags, as_recipe
from distaff.tasks.tokenizer import save_tokenizer

logger = logging.getLogger("distaff")

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
    """Return the config that the flags describe; one from a model type alone takes the tokenizer's vocabulary."""
    from transformers import CONFIG_MAPPING, AutoConfig

    name = flags.config_name or flags.model_name_or_path
    if name is not None:
        folder = resolve(name, weights=False, token=token, revision=flags.model_revision)
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"'{name}' holds no config that opens: {_first_line(error)}") from error
    elif flags.model_type is None:
        raise UsageError("There is no model: give --model_name_or_path, --config_name or --model_type.")
    elif flags.model_type not in CONFIG_MAPPING:
        raise UsageError(f"--model_type '{flags.model_type}' is no model type of Transformers.")
    else:
        config = CONFIG_MAPPING[flags.model_type]()
        fit_config_to_tokenizer(config, tokenizer)
    if flags.config_overrides:
        override(config, flags.config_overrides)
    return config


def fit_config_to_tokenizer(config, tokenizer) -> None:
    """Set the vocabulary and the special ids of a new config to the tokenizer's."""
    config.vocab_size = len(tokenizer)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(tokenizer, name) is not None:
            setattr(config, name, getattr(tokenizer, name))


def override(config, text: str) -> None:
    """Change `config` by `name=value,...`; each value is read as the type that the field has."""
    try:
        config.update_from_string(text)
    except (ValueError, AttributeError) as error:
        raise UsageError(f"--config_overrides '{text}' does not fit the config: {_first_line(error)}.") from error


def load_model(auto_class, flags: ModelFlags, config, *, seed: int, token: str | None = None) -> Any:
    """Return the model with the checkpoint's weights, or random ones."""
    settings: dict[str, Any] = {
        "dtype": flags.dtype,
        "param_dtype": flags.param_dtype,
        "seed": seed,
        "gradient_checkpointing": flags.gradient_checkpointing,
        "scan_layers": flags.scan_layers,
    }
    if flags.model_name_or_path is None:
        return auto_class.from_config(config, **settings)
    return auto_class.from_pretrained(
        flags.model_name_or_path, config=config, revision=flags.model_revision, token=token, **settings
    )


def row_length(flags: TextFlags, tokenizer, longest: int) -> int:
    """Return the tokens a row, which neither the model nor the flags exceed."""
    if flags.max_seq_length is not None:
        if flags.max_seq_length > longest:
            raise UsageError(
                f"--max_seq_length {flags.max_seq_length} is more than the {longest} positions of the model: lower it."
            )
        return flags.max_seq_length
    return min(tokenizer.model_max_length, longest, LONGEST_BY_DEFAULT)


def check_vocabulary(tokenizer, config) -> None:
    """Raise `UsageError` where the tokenizer has ids that the model has not."""
    if len(tokenizer) > config.vocab_size:
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


def log_start(flags: ModelFlags, training: TrainingFlags) -> None:
    """Say where the weights come from, in the order in which sources are tried."""
    sources = [
        (training.resume_from_checkpoint == "newest", f"1. the newest complete checkpoint of {training.output_dir}"),
        (training.resume_from_checkpoint is not None, f"2. the checkpoint {training.resume_from_checkpoint}"),
        (flags.model_name_or_path is not None, f"3. the pretrained weights of {flags.model_name_or_path}"),
        (True, f"4. random weights of seed {training.seed}"),
    ]
    logger.info("Initialisation: %s.", next(text for holds, text in sources if holds))


def prepare_folder(flags: TrainingFlags, recipe: str) -> Path:
    """Make the output folder and write the resolved flags into it. A folder with something in it is refused."""
    if not flags.output_dir:
        raise UsageError("Training writes a folder: name it with --output_dir.")
    folder = Path(flags.output_dir)
    if folder.is_file():
        raise UsageError(f"--output_dir '{folder}' is a file: name a folder.")
    going_on = flags.overwrite_output_dir or flags.resume_from_checkpoint is not None
    if folder.is_dir() and _holds_a_run(folder) and not going_on:
        raise UsageError(
            f"'{folder}' already holds a run: go on with --resume_from_checkpoint, start anew with "
            "--overwrite_output_dir, or name another --output_dir."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            values = {"recipe": recipe, **as_recipe(flags)}
            (folder / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise DistaffError(f"--output_dir '{folder}' cannot be written: {error.strerror}.") from error
    return folder


def _holds_a_run(folder: Path) -> bool:
    """Tell whether a run wrote here. A tokenizer and a config that wait for a model are no run."""
    marks = ("checkpoints", "recipe.yaml", "metrics.jsonl", "all_results.json")
    return any((folder / mark).exists() for mark in marks) or any(folder.glob("*.safetensors"))


def results_folder(name: str) -> Path:
    """Return the folder `name`, made if need be, for results alone."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DistaffError(f"--output_dir '{folder}' cannot be written: {error.strerror}.") from error
    return folder


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results that an earlier run wrote, or those of the last log where it was killed before it did."""
    everything = folder / "all_results.json"
    if everything.exists():
        return json.loads(everything.read_text())
    log = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {name: value for row in rows for name, value in row.items() if name not in ("step", "epoch")}


def write_results(folder: Path, name: str, values: dict[str, Any]) -> None:
    """Write `<name>_results.json`, and add the values to `all_results.json`."""
    everything = folder / "all_results.json"
    before = json.loads(everything.read_text()) if everything.exists() else {}
    for path, content in ((folder / f"{name}_results.json", values), (everything, {**before, **values})):
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def finish(
    folder: Path,
    flags: Any,
    *,
    model: FlaxPreTrainedModel,
    params: Any,
    tokenizer,
    task: str | None,
    metrics: dict[str, float],
) -> None:
    """Write model, tokenizer and card, and publish them where asked. Publishing that fails leaves the run whole."""
    model.save_pretrained(folder, params)
    save_tokenizer(tokenizer, folder)
    base = flags.model_name_or_path
    write_card(
        folder,
        model_name=(flags.hub_model_id or folder.name).rpartition("/")[2],
        model_type=model.config.model_type,
        task=task,
        repo_id=flags.hub_model_id,
        base_model=base,
        datasets=[flags.dataset_name] if flags.dataset_name else [],
        metrics=metrics,
        command=command_line(),
        hyperparameters=_hyperparameters(flags),
        training_log=_logged(folder / "metrics.jsonl"),
        versions={name: version(name) for name in ("distaff", "jax", "flax", "optax", "transformers", "datasets")},
    )
    if flags.push_to_hub:
        publish(folder, flags)


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


def command_line() -> str:
    """Return the command of this run as it can be typed again, without the token."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    hidden = ["..." if index and words[index - 1] == "--hub_token" else word for index, word in enumerate(words)]
    return shlex.join("--hub_token=..." if word.startswith("--hub_token=") else word for word in hidden)


def _hyperparameters(flags: TrainingFlags) -> dict[str, Any]:
    names = (
        "learning_rate per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps seed "
        "weight_decay adafactor adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type warmup_steps "
        "num_train_epochs max_steps dtype param_dtype"
    )
    return {name: getattr(flags, name) for name in names.split()}


def _logged(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    shown = ("step", "epoch", "loss", "eval_loss", "eval_perplexity", "eval_accuracy")
    evaluated = [row for row in rows if any(name.startswith("eval_") for name in row)] or rows
    return [{name: row[name] for name in shown if name in row} for row in evaluated]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
