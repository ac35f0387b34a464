"""Texts of a dataset of the Hub, or of a folder that `save_to_disk` wrote."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.errors

from distaff.core.errors import DataError, UsageError, listed


def load_hub_texts(
    name: str,
    *,
    config_name: str | None = None,
    split: str = "train",
    text_column: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    streaming: bool = False,
    token: str | bool | None = None,
) -> Any:
    """Return the split's texts as a dataset with the one column "text", without blank texts and nulls."""
    dataset = load_split(
        name, config_name=config_name, split=split, cache_dir=cache_dir, streaming=streaming, token=token
    )
    features = dataset.features or dataset._resolve_features().features
    strings = [key for key, kind in features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    column = text_column or ("text" if "text" in features else next(iter(strings), None))
    if column not in strings:
        what = f"no column '{column}' of strings" if column else "no column of strings"
        raise DataError(f"The dataset '{name}' has {what}: it has {listed(f'{k} ({v})' for k, v in features.items())}.")
    dataset = dataset.select_columns([column])
    if column != "text":
        dataset = dataset.rename_column(column, "text")
    kept = dataset.filter(_has_text, input_columns=["text"])
    if not streaming and len(kept) == 0:
        raise DataError(f"The split '{split}' of '{name}' has no text: {len(dataset)} blank rows and nothing else.")
    return kept


def load_split(
    name: str,
    *,
    config_name: str | None = None,
    split: str = "train",
    cache_dir: str | os.PathLike | None = None,
    streaming: bool = False,
    token: str | bool | None = None,
) -> Any:
    """Return a split with all its columns, from the Hub or from a folder that `save_to_disk` wrote."""
    folder = Path(name)
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        dataset = _load_folder(folder, split)
        return dataset.to_iterable_dataset() if streaming else dataset
    return _load(name, config_name, split, cache_dir, streaming, token)


def split_names(name: str, *, config_name: str | None = None, token: str | bool | None = None) -> list[str]:
    """Return the splits of a dataset, so that a recipe knows whether there is one for validation."""
    if (Path(name) / "dataset_dict.json").exists():
        return list(json.loads((Path(name) / "dataset_dict.json").read_text())["splits"])
    if (Path(name) / "state.json").exists():
        return ["train"]
    with _explained(name):
        return datasets.get_dataset_split_names(name, config_name, token=token)


def _has_text(text: str | None) -> bool:
    return text is not None and bool(text.strip())


def _load_folder(folder: Path, split: str) -> datasets.Dataset:
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"The dataset in '{folder}' cannot be read: {_first_line(error)}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UsageError(f"'{folder}' has no split '{split}': it has {listed(dataset)}.")
        return dataset[split]
    return dataset


def _load(
    name: str,
    config_name: str | None,
    split: str,
    cache_dir: str | os.PathLike | None,
    streaming: bool,
    token: str | bool | None,
) -> Any:
    cache = None if cache_dir is None else str(cache_dir)
    if Path(name).is_dir():
        cache = str(_folder_cache(Path(name), cache_dir))
    with _explained(name):
        return datasets.load_dataset(name, config_name, split=split, cache_dir=cache, streaming=streaming, token=token)


def _folder_cache(folder: Path, cache_dir: str | os.PathLike | None) -> Path:
    """Return where the dataset of files in `folder` is cached, which depends on what they are now.

    `datasets` itself knows a folder whose README.md names configurations by the last part of its path alone, and takes
    what another folder of that name, or this one, held before.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:20]
    return Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "distaff-folder" / key


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what `datasets` raises into one sentence."""
    try:
        yield
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"There is no dataset '{name}' on the Hub or in this folder, or it is private or gated: "
            "check its name, and 'hf auth login' if it is yours."
        ) from error
    except (ConnectionError, huggingface_hub.errors.OfflineModeIsEnabled) as error:
        raise DataError(
            f"The dataset '{name}' is not in the cache and the Hub cannot be reached: check the network and "
            "HF_HUB_OFFLINE, or give files by --train_file."
        ) from error
    except ValueError as error:  # what `datasets` raises for unknown configurations and splits
        raise UsageError(f"The dataset '{name}' cannot be loaded as asked: {_first_line(error)}") from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"The dataset '{name}' cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
