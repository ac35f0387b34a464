"""The output folder of a run: whether it is free, what stands there at the start, and the results at the end."""

import json
import math
import os
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import jax
import yaml

from distaff.core.errors import DistaffError, UsageError, listed
from distaff.core.processes import agreed, is_first, wait_for_all
from distaff.hub.card import remove_generated_card
from distaff.hub.files import INDEX_SUFFIX
from distaff.hub.repo import COMPANIONS
from distaff.tasks._flags import as_recipe
from distaff.train.checkpoint import complete_steps
from distaff.train.resume import CHECKPOINTS, IF_ANY, LEFT_BEHIND, goes_on_in

RESULTS = ("all_results.json", "train_results.json", "eval_results.json", "predict_results.json")
PREDICTIONS = "generated_predictions.txt"
# Of predictions of classes: with a suffix of the set, and one of the format.
PREDICT = "predict_results"
# All that predictions are written to; answers to questions by id too.
PREDICTED = (*(f"{PREDICT}*.{kind}" for kind in ("csv", "jsonl", "conll")), "*predictions.json", "*null_odds.json")
# What shows that a run wrote here.
MARKS = ("recipe.yaml", "metrics.jsonl", CHECKPOINTS, *RESULTS)
# What a run that ended before its first checkpoint leaves.
BARELY_BEGUN = {"recipe.yaml", "metrics.jsonl", CHECKPOINTS, LEFT_BEHIND, "runs"}
# For how long a file that another host wrote may be unseen.
_NETWORK_DELAY = 10.0
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".msgpack", ".h5", ".pt", ".pth", ".ckpt", ".onnx", ".gguf")
# What people write into a folder, a repository's clone for example, and a run leaves alone.
NOT_IN_THE_WAY = (".", "README", "LICENSE", "LICENCE", "NOTICE")


def output_folder(name: str | None, *, flag: str = "--output_dir") -> Path:
    """Return the folder `name`, made if need be; `UsageError` for none or a file, `DistaffError` if it is read-only."""
    if not name:
        raise UsageError(f"{flag} is empty: name the folder to write to.")
    folder = Path(name)
    if folder.is_file():
        raise UsageError(f"{flag} '{folder}' is a file: name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # better now than after the work
    except OSError as error:
        raise DistaffError(f"{flag} '{folder}' cannot be written: {error.strerror}.") from error
    return folder


def check_folder(flags: Any) -> Path:
    """Return the output folder of a training. One that holds something is refused without a flag that allows it."""
    if not flags.output_dir:
        raise UsageError("Training writes a folder: name it with --output_dir.")
    folder = Path(flags.output_dir)
    # Looked at by one process: another may be late, and find what the run has written by then.
    agreed(partial(_check_content, folder, flags))
    output_folder(flags.output_dir)
    _check_shared(folder)
    return folder


def _check_content(folder: Path, flags: Any) -> None:
    fresh = not goes_on_in(folder, flags.resume_from_checkpoint)
    if flags.resume_from_checkpoint == IF_ANY and not complete_steps(folder / CHECKPOINTS):
        fresh = True
    if folder.is_dir() and not flags.overwrite_output_dir and fresh:
        found = in_the_way(folder, flags)
        if flags.resume_from_checkpoint == IF_ANY and set(found) <= BARELY_BEGUN:
            return
        if found:
            run = "already holds a run" if set(found) & set(MARKS) else f"is not empty (it holds {listed(found, 3)})"
            resume = "go on with --resume_from_checkpoint, " if complete_steps(folder / CHECKPOINTS) else ""
            raise UsageError(
                f"'{folder}' {run}: {resume}start anew with --overwrite_output_dir, or name another --output_dir."
            )


def _check_shared(folder: Path) -> None:
    """Raise `UsageError` where the processes do not see one folder: each would keep a part of every checkpoint."""
    if jax.process_count() == 1:
        return
    mark = folder / agreed(lambda: f".seen-by-all-{uuid.uuid4().hex}")
    try:
        if is_first():
            mark.touch()
        wait_for_all()
        deadline = time.monotonic() + _NETWORK_DELAY
        while not (seen := mark.exists()) and time.monotonic() < deadline:
            list(folder.iterdir())  # makes a network file system look again
            time.sleep(0.2)
        if not seen:
            raise UsageError(
                f"--output_dir '{folder}' is not the folder that process 0 writes to: name one on a file system that "
                "all hosts share."
            )
        wait_for_all()
    finally:
        if is_first():
            mark.unlink(missing_ok=True)


def in_the_way(folder: Path, flags: Any) -> list[str]:
    """Return the files of `folder` that a run would replace or mix up with its own.

    A config and a tokenizer that the run starts from are none.
    """
    own_config = _is(flags.config_name, folder)
    own_tokenizer = _is(flags.tokenizer_name or flags.config_name, folder)
    found = []
    for path in sorted(folder.iterdir()):
        name = path.name
        companion = name.endswith(COMPANIONS) and not name.endswith(INDEX_SUFFIX) and name not in MARKS
        own = own_config if name == "config.json" else own_tokenizer and companion
        if not own and not name.startswith(NOT_IN_THE_WAY):
            found.append(name)
    return found


def begin(folder: Path, flags: Any, recipe: str) -> None:
    """Write the resolved flags, and remove an earlier run's model and results where they are to be overwritten.

    For `fit`'s `on_start`: what is refused before leaves the folder as it was.
    """
    if jax.process_index() != 0:
        return
    try:
        if flags.overwrite_output_dir and not goes_on_in(folder, flags.resume_from_checkpoint):
            tables = [path.name for kind in PREDICTED for path in folder.glob(kind)]
            for name in (*RESULTS, PREDICTIONS, *tables):
                (folder / name).unlink(missing_ok=True)
            # A model that the run starts from stays until the new one replaces it.
            if not _is(flags.model_name_or_path, folder):
                _remove_model(folder)
        values = {"recipe": recipe, **as_recipe(flags)}
        replace_text(folder / "recipe.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise DistaffError(f"--output_dir '{folder}' cannot be written: {error.strerror}.") from error


def write_results(folder: Path, parts: dict[str, dict[str, Any]], *, add: bool = False) -> None:
    """Write `<name>_results.json` for each part and all of them as `all_results.json`; `add` keeps what is there.

    A part without values has no file: one of an earlier run would be taken for this one's.
    """
    everything = read_json(folder / "all_results.json") if add else {}
    for name, values in parts.items():
        path = folder / f"{name}_results.json"
        # JSON has no infinity and no NaN.
        values = {key: value if _is_json(value) else None for key, value in values.items()}
        if values:
            replace_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
        else:
            path.unlink(missing_ok=True)
        everything |= values
    replace_text(folder / "all_results.json", json.dumps(everything, indent=2, sort_keys=True) + "\n")


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def log_rows(folder: Path) -> list[dict[str, Any]]:
    """Return what the run logged, without lines that were cut short."""
    path = folder / "metrics.jsonl"
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def logged_at(folder: Path, step: int) -> dict[str, Any]:
    """Return what was logged at `step`; what was not finite, and stands there as null, is nan."""
    rows = [row for row in log_rows(folder) if row.get("step") == step]
    values = {name: value for row in rows for name, value in row.items() if name != "step"}
    return {name: math.nan if value is None else value for name, value in values.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`, an empty one where there is none or it was cut short."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def replace_text(path: Path, text: str) -> None:
    """Write `text` so that `path` is whole at any time."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _remove_model(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.name.removesuffix(INDEX_SUFFIX).endswith(WEIGHT_SUFFIXES):
            path.unlink()
    remove_generated_card(folder)


def _is(name: str | None, folder: Path) -> bool:
    return bool(name) and Path(str(name)).exists() and Path(str(name)).samefile(folder)
