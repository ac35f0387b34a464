"""Model cards: the README.md of a model folder, with metadata that the Hub reads.

What is generated stands between marks, in the metadata and in the text; what is outside them is the user's and stays.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distaff.core.errors import DistaffError

YAML_MARK = "# distaff wrote what follows in this block and replaces it at each save; keys above it win"
BEGIN = "<!-- distaff: generated; write above this line, what is below is replaced at each save -->"
END = "<!-- distaff: end of the generated part; what follows is yours -->"

FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
# A Hub id, as opposed to a path or a file of the user's machine.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
LOCAL_SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".parquet", ".tsv", ".gz")
MAX_LOG_ROWS = 20


def write_card(
    folder: str | os.PathLike[str],
    *,
    model_name: str,
    model_type: str,
    task: str | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    tags: Sequence[str] = (),
    language: str | Sequence[str] | None = None,
    license: str | None = None,
    datasets: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    command: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    training_log: Sequence[Mapping[str, Any]] = (),
    versions: Mapping[str, str] | None = None,
    library_name: str = "transformers",
) -> Path:
    """Write or renew `README.md` in `folder` and return its path.

    `task` is the Hub's name for it ("fill-mask"). `base_model` and `datasets` may be Hub ids or paths; only ids enter
    the metadata. Of `training_log` (rows of named values) at most 20 are shown, evenly spaced. A README that is there
    keeps its metadata and text: the generated part is put below a mark, or replaces what stood below it.
    """
    path = Path(folder) / "README.md"
    try:
        existing = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise DistaffError(f"Cannot read '{path}' ({error}): move it away, or save it as UTF-8.") from error
    user_yaml, above, below = _users_parts(existing)
    taken = set(re.findall(r"^([\w-]+)\s*:", user_yaml, re.MULTILINE))
    metadata = _metadata(
        taken,
        model_name=model_name,
        base_model=base_model,
        task=task,
        tags=["distaff", "flax", "jax", model_type, *tags],
        language=language,
        license=license,
        datasets=datasets,
        metrics=metrics or {},
        library_name=library_name,
    )
    text = _text(
        title="" if above.strip() else f"# {model_name}\n\n",
        name=repo_id or model_name,
        model_type=model_type,
        task=task,
        base_model=base_model,
        datasets=datasets,
        metrics=metrics or {},
        command=command,
        hyperparameters=hyperparameters or {},
        training_log=training_log,
        versions=versions or {},
    )
    above = above.rstrip() + "\n\n" if above.strip() else ""
    card = f"---\n{user_yaml}{YAML_MARK}\n{metadata}---\n\n{above}{BEGIN}\n\n{text}\n{END}\n{below}"
    return _replace(path, card)


def remove_generated_card(folder: str | os.PathLike[str]) -> None:
    """Take the generated part out of `README.md`, and the file away where nothing else is in it."""
    path = Path(folder) / "README.md"
    existing = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if BEGIN not in existing:
        return
    user_yaml, above, below = _users_parts(existing)
    kept = f"---\n{user_yaml}---\n\n" if user_yaml.strip() else ""
    kept += "\n".join(part for part in (above, below) if part.strip())
    if kept:
        _replace(path, kept)
    else:
        path.unlink()


def _replace(path: Path, card: str) -> Path:
    """Write the card under another name, rename it and return `path`, so that a README is whole at any time."""
    temporary = path.with_name(".README.md.tmp")
    try:
        temporary.write_text(card, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DistaffError(f"Cannot write '{path}': {error.strerror or error}.") from error
    return path


def _users_parts(existing: str) -> tuple[str, str, str]:
    """Return the metadata, the text above and the text below that are not generated."""
    match = FRONT_MATTER.match(existing)
    user_yaml = match[1].partition(YAML_MARK)[0] if match else ""
    above, begun, rest = (existing[match.end() :] if match else existing).partition(BEGIN)
    _, ended, below = rest.partition(END)
    if begun and not ended:  # the closing mark was deleted: keep what follows rather than guess where it ended
        below = "\n" + rest.strip("\n") + "\n"
    return user_yaml, above.lstrip("\n"), below.removeprefix("\n")


def _metadata(
    taken: set[str],
    *,
    model_name: str,
    base_model: str | None,
    task: str | None,
    tags: list[str],
    language: str | Sequence[str] | None,
    license: str | None,
    datasets: Sequence[str],
    metrics: Mapping[str, float],
    library_name: str,
) -> str:
    """Return the metadata as YAML, without the keys that the user has `taken`."""
    from huggingface_hub import EvalResult, ModelCardData

    public = [name for name in datasets if _is_hub_id(name)]
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type=public[0] if public else "text",
            dataset_name=", ".join(Path(name).name if name not in public else name for name in datasets)
            or "held-out data",
            metric_type=name,
            metric_value=float(f"{value:.6g}"),
            metric_name=name,
        )
        for name, value in finite.items()
    ]
    results = [] if "model-index" in taken else results
    data = ModelCardData(
        library_name=library_name,
        base_model=base_model if base_model and _is_hub_id(base_model) else None,
        pipeline_tag=task,
        tags=tags,
        language=language if language is None or isinstance(language, str) else list(language),
        license=license,
        datasets=public or None,
        eval_results=results or None,
        model_name=model_name if results else None,
    )
    for key in taken:
        data.pop(key)
    return data.to_yaml() + "\n"


def _is_hub_id(name: str) -> bool:
    return bool(HUB_ID.fullmatch(name)) and not name.endswith(LOCAL_SUFFIXES) and not Path(name).exists()


def _text(
    *,
    title: str,
    name: str,
    model_type: str,
    task: str | None,
    base_model: str | None,
    datasets: Sequence[str],
    metrics: Mapping[str, float],
    command: str | None,
    hyperparameters: Mapping[str, Any],
    training_log: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str],
) -> str:
    origin = f"started from `{base_model}`" if base_model else "trained from random weights"
    data = f" on {', '.join(f'`{dataset}`' for dataset in datasets)}" if datasets else ""
    parts = [f"{title}A {model_type} model, {origin}{data}, with distaff (Flax on JAX)."]
    if metrics:
        parts.append("## Results\n\n" + _table([{"metric": key, "value": value} for key, value in metrics.items()]))
    if task:
        parts.append(f'## Use\n\n```python\nfrom distaff import pipeline\n\nrun = pipeline("{task}", "{name}")\n```')
    if command:
        parts.append(f"## Training\n\n```sh\n{command}\n```")
    if hyperparameters:
        rows = [{"setting": key, "value": value} for key, value in hyperparameters.items()]
        parts.append("### Hyperparameters\n\n" + _table(rows))
    if training_log:
        last = len(training_log) - 1
        count = min(len(training_log), MAX_LOG_ROWS)
        shown = sorted({round(i * last / max(count - 1, 1)) for i in range(count)})
        parts.append("### Log\n\n" + _table([training_log[index] for index in shown]))
    if versions:
        parts.append("### Versions\n\n" + "\n".join(f"- {package} {version}" for package, version in versions.items()))
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(key, "")) for key in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
