"""Questions about texts, and their answers: SQuAD's JSON (v1 and v2), flat files and Hub sets as rows of one form.

A row is `id`, `question`, `context`, and `texts` and `starts` of its answers: equally many, none where the context does
not answer the question, and null where nobody says. Every row of the source is a row here: what cannot be one is
refused with its place.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.arrow import record_batches, replacing, strings, write_table
from distaff.data.files import TABLE_READERS, expand_files, place_word

logger = logging.getLogger(__name__)

# Goes into the names of cached files: raise it when what they hold changes.
_FORMAT = 1
_FIELDS = ("id", "question", "context", "answers")
_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "question": pa.string(),
        "context": pa.string(),
        "texts": pa.list_(pa.string()),
        "starts": pa.list_(pa.int32()),
    }
)


@dataclass(frozen=True)
class Question:
    """A question. `texts` and `starts` are its answers and their first characters in `context`, None if not known."""

    id: str
    question: str
    context: str
    texts: list[str] | None
    starts: list[int] | None
    place: str


def load_questions(
    *,
    files: str | Sequence[str] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    need_answers: bool = True,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> datasets.Dataset:
    """Return the questions of `files` (.json, .jsonl, .csv, .parquet) or of a split of a Hub set, converted once.

    Raises `DataError` for the first row that cannot be used, with its file and place. Without `need_answers` rows may
    lack their answers.
    """
    if files:
        paths = expand_files(files)
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        alone = len(paths) == 1
        found = (
            question
            for path in paths
            for question in read_questions(path, need_answers=need_answers, prefix="" if alone else f"{path.name}-")
        )
        return _cached(found, stats, need_answers, cache_dir, " and ".join(str(path) for path in paths))
    if dataset_name is None:
        raise UsageError("There are no questions to read: give --train_file, --validation_file or --dataset_name.")
    from distaff.data.hub_text import load_split

    dataset = load_split(dataset_name, config_name=dataset_config_name, split=split, cache_dir=cache_dir, token=token)
    name = f"'{dataset_name}', split '{split}'"
    return _cached(_of_rows(dataset, name, need_answers), dataset._fingerprint, need_answers, cache_dir, name)


# Reading.


def read_questions(path: Path, *, need_answers: bool = True, prefix: str = "") -> Iterator[Question]:
    """Yield the questions of a file. Raises `DataError` with the place of what is wrong.

    Rows of a flat file without ids have their number, behind `prefix`, as id.
    """
    chosen: Sequence[str] = ()

    def select(record: Mapping[str, Any], place: str) -> Sequence[str]:
        nonlocal chosen
        chosen = ("paragraphs",) if "paragraphs" in record else _columns(record, f"'{path}'", need_answers)
        return chosen

    if path.suffix.lower() not in TABLE_READERS:
        raise UsageError(f"'{path}' has no columns of questions and contexts: give one of {listed(TABLE_READERS)}.")
    try:
        for row, values in TABLE_READERS[path.suffix.lower()](path, select):
            if values is None:  # a blank line
                continue
            if chosen == ("paragraphs",):
                yield from _of_article(values[0], f"{path}, article {row}", need_answers)
            else:
                record = {"id": f"{prefix}{row}", **dict(zip(chosen, values))}
                yield question_of(record, f"{path}, {place_word(path)} {row}", need_answers=need_answers)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error


def _columns(record: Mapping[str, Any], where: str, need_answers: bool) -> tuple[str, ...]:
    """Return the fields that the rows of a flat source have; without ids the rows are numbered."""
    needed = _FIELDS[1:] if need_answers else _FIELDS[1:3]
    missing = [name for name in needed if name not in record]
    if missing:
        raise DataError(
            f"{where} has no {listed(missing)}: it has {listed(record) or 'nothing'}; a row needs {listed(needed)}, or "
            "the file SQuAD's articles with paragraphs."
        )
    return tuple(name for name in _FIELDS if name in record)


def _of_article(paragraphs: Any, place: str, need_answers: bool) -> Iterator[Question]:
    for number, paragraph in enumerate(_list(paragraphs, "paragraphs", place), start=1):
        where = f"{place}, paragraph {number}"
        context, questions = (_field(paragraph, name, where) for name in ("context", "qas"))
        for count, record in enumerate(_list(questions, "qas", where), start=1):
            spot = f"{where}, question {count}"
            _field(record, "question", spot)
            if "answers" not in record and need_answers and not record.get("is_impossible"):
                raise DataError(f"{spot}: no 'answers': give a list, which is empty where there is no answer.")
            full = {"id": None, "answers": [] if need_answers else None, **record, "context": context}
            if full["id"] is None:
                raise DataError(f"{spot}: no 'id', by which predictions are told apart.")
            question = question_of(full, f"{spot} ('{full['id']}')", need_answers=need_answers)
            if record.get("is_impossible") and question.texts:
                raise DataError(
                    f"{question.place}: is_impossible is true, and there is the answer '{question.texts[0]}': one of "
                    "them is wrong."
                )
            yield question


def _of_rows(dataset: Any, name: str, need_answers: bool) -> Iterator[Question]:
    columns = _columns(dataset.features, name, need_answers)
    for row, values in enumerate(dataset.select_columns(list(columns)), start=1):
        yield question_of({"id": str(row), **values}, f"{name}, row {row}", need_answers=need_answers)


def question_of(record: Mapping[str, Any], place: str, *, need_answers: bool) -> Question:
    """Return the question of a record with `id`, `question`, `context` and `answers`. Raises `DataError`."""
    question, context = record["question"], record["context"]
    for name, text in (("question", question), ("context", context)):
        if text is not None and not isinstance(text, str):
            raise DataError(f"{place}: the {name} is of type {type(text).__name__} ({str(text)[:40]!r}), not a string.")
        # Signs without width are nothing to read: tokenizers leave them out.
        if not text or not any(sign.isprintable() and not sign.isspace() for sign in text):
            raise DataError(f"{place}: the {name} is empty: correct the row, or take it out.")
    texts, starts = _answers(record.get("answers"), place)
    if texts is None and need_answers:
        raise DataError(f"{place}: the answers are null: give a list, which is empty where there is no answer.")
    for text, start in zip(texts or (), starts or ()):
        _check_answer(context, text, start, place)
    return Question(str(record["id"]), question, context, texts, starts, place)


def _answers(value: Any, place: str) -> tuple[list[str] | None, list[int] | None]:
    """Return texts and starts of `{"text": [...], "answer_start": [...]}`, of a list of objects, or of their JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise DataError(f"{place}: the answers are not valid JSON ({error}).") from error
    if value is None:
        return None, None
    if isinstance(value, Mapping):
        texts, starts = (value.get(name) for name in ("text", "answer_start"))
    else:
        each = _list(value, "answers", place)
        texts, starts = ([_field(answer, name, place) for answer in each] for name in ("text", "answer_start"))
    texts, starts = _list(texts, "text of the answers", place), _list(starts, "answer_start of the answers", place)
    if len(texts) != len(starts):
        raise DataError(f"{place}: {len(texts)} answer texts and {len(starts)} offsets: each answer needs both.")
    for text, start in zip(texts, starts):
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise DataError(f"{place}: an answer needs a string and a whole number, not {text!r} and {start!r}.")
    return texts, starts


def _check_answer(context: str, text: str, start: int, place: str) -> None:
    if not text.strip():
        raise DataError(f"{place}: an answer is empty: a question without an answer has an empty list of answers.")
    if start >= 0 and context.startswith(text, start):
        return
    found = [place for place in (context.find(text), context.rfind(text)) if place >= 0]
    nearest = min(found, key=lambda place: abs(place - start), default=None)
    there = repr(context[max(0, start) : max(0, start) + len(text)][:40])
    where = "it stands nowhere in it" if nearest is None else f"it stands at {nearest}"
    raise DataError(
        f"{place}: the answer {text[:40]!r} is not at answer_start {start} of the context, where {there} stands; "
        f"{where}: correct the row."
    )


def _list(value: Any, name: str, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{place}: '{name}' is {'missing' if value is None else type(value).__name__}, not a list.")
    return value


def _field(record: Any, name: str, place: str) -> Any:
    if not isinstance(record, Mapping) or record.get(name) is None:
        has = listed(record) or "nothing" if isinstance(record, Mapping) else f"a {type(record).__name__}"
        raise DataError(f"{place}: no '{name}', only {has}.")
    return record[name]


# Rows on disk.


def _cached(
    questions: Iterable[Question], source: Any, need_answers: bool, cache_dir: str | os.PathLike | None, name: str
) -> datasets.Dataset:
    key = hashlib.sha256(json.dumps([_FORMAT, source, need_answers]).encode()).hexdigest()[:20]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "distaff-questions" / key
    target, count = folder / "questions.arrow", folder / "count"
    if not count.exists():
        write_table(target, _SCHEMA, record_batches(_with_different_ids(questions), _record_batch))
        with replacing(count) as partial:  # written last: the cache is complete once it is there
            partial.touch()
    dataset = datasets.Dataset.from_file(str(target))
    if len(dataset) == 0:
        raise DataError(f"{name} holds no question: there is nothing to read.")
    logger.info("%s: %d questions, %d without an answer.", name, len(dataset), unanswered(dataset))
    return dataset


def _with_different_ids(questions: Iterable[Question]) -> Iterator[Question]:
    seen: dict[str, str] = {}
    for question in questions:
        if question.id in seen:
            raise DataError(
                f"{question.place}: the id '{question.id}' is that of {seen[question.id]} too: predictions are told "
                "apart by it."
            )
        seen[question.id] = question.place
        yield question


def _record_batch(held: list[Question]) -> pa.RecordBatch:
    columns = [
        *(strings([getattr(question, name) for question in held]) for name in ("id", "question", "context")),
        pa.array([question.texts for question in held], pa.list_(pa.string())),
        pa.array([question.starts for question in held], pa.list_(pa.int32())),
    ]
    return pa.record_batch(columns, schema=_SCHEMA)


def unanswered(dataset: datasets.Dataset) -> int:
    """Return how many questions are said to have no answer."""
    return sum(texts is not None and not texts for texts in dataset["texts"])
