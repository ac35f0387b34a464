"""Questions and windows by the flags of `qa`, and the answers and figures that the logits of all windows come to."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distaff.core.errors import UsageError
from distaff.data.batches import Batches
from distaff.data.columns import row_lengths
from distaff.data.questions import load_questions, unanswered
from distaff.data.spans import Answer, ScoredWindow, SpanSettings, answer
from distaff.data.text import check_ids, split_validation
from distaff.data.windows import WindowCollate, tokenize_questions
from distaff.question_pipelines import takes_token_types
from distaff.tasks import _folder
from distaff.tasks._finetune import HeldOut, Outputs
from distaff.tasks._squad_scores import best_thresholds, squad_v1_scores, squad_v2_scores

# What windows have where neither model nor tokenizer nor flags say otherwise.
WINDOW = 384
# Lengths are multiples of this, so that data that grew by a word does not mean other programs.
_LENGTH_MULTIPLE = 8


# Data.


def read(flags: Any) -> tuple[Any, Any, Any]:
    """Return the questions to train on, to evaluate on and to predict for, each None where not asked for."""
    train = evaluation = test = None
    own = bool(flags.validation_file) or _has_split(flags, "validation")
    if flags.do_train or (flags.do_eval and not own):
        train = _load(flags, flags.train_file, "train")
    if flags.do_eval and own:
        evaluation = _load(flags, flags.validation_file, "validation")
    elif flags.do_eval:
        train, evaluation = split_validation(train, percentage=flags.validation_split_percentage)
    train = _first(train, flags.max_train_samples) if flags.do_train else None
    if flags.do_predict:
        test = _first(_load(flags, flags.test_file, "test", need_answers=False), flags.max_predict_samples)
    return train, _first(evaluation, flags.max_eval_samples), test


def _has_split(flags: Any, split: str) -> bool:
    from distaff.data.hub_text import split_names

    return flags.dataset_name is not None and split in split_names(
        flags.dataset_name, config_name=flags.dataset_config_name, token=flags.hub_token
    )


def _load(flags: Any, files: str | None, split: str, *, need_answers: bool = True) -> Any:
    found = load_questions(
        files=files,
        dataset_name=flags.dataset_name,
        dataset_config_name=flags.dataset_config_name,
        split=split,
        need_answers=need_answers,
        cache_dir=flags.cache_dir,
        token=flags.hub_token,
    )
    count = 0 if flags.version_2_with_negative else unanswered(found)
    if count:
        first = next(row["id"] for row in found if row["texts"] == [])
        name = files or f"'{flags.dataset_name}', split '{split}'"
        raise UsageError(
            f"{name}: {count} of {len(found)} questions have no answer, the first is '{first}': add "
            "--version_2_with_negative, or take them out."
        )
    return found


def _first(questions: Any, count: int | None) -> Any:
    return questions if questions is None or count is None else questions.select(range(min(count, len(questions))))


@dataclass(frozen=True)
class Asked:
    """Questions of an evaluation, and their windows."""

    questions: Any
    windows: Any

    @cached_property
    def references(self) -> dict[str, list[str]]:
        """The texts of the answers by id; those that nobody says are not in it."""
        pairs = zip(self.questions["id"], self.questions["texts"])
        return {name: texts for name, texts in pairs if texts is not None}

    @property
    def labelled(self) -> bool:
        """Whether all answers are known."""
        return len(self.references) == len(self.questions)


@dataclass(frozen=True)
class Windows:
    """Makes windows and batches for a model and its tokenizer."""

    flags: Any
    model: Any
    tokenizer: Any

    @property
    def length(self) -> int:
        """Tokens a window at most."""
        longest, asked = self.model.longest_input or WINDOW, self.flags.max_seq_length
        if asked is None:
            return min(self.tokenizer.model_max_length, longest, WINDOW)
        if asked > longest:
            raise UsageError(f"--max_seq_length {asked} is more than the {longest} positions of the model: lower it.")
        return asked

    def of(self, questions: Any) -> Any:
        """Return a row for each window."""
        windows = tokenize_questions(
            questions,
            tokenizer=self.tokenizer,
            max_length=self.length,
            stride=self.flags.doc_stride,
            token_types=takes_token_types(self.model, self.tokenizer),
            num_proc=self.flags.preprocessing_num_workers,
            overwrite_cache=self.flags.overwrite_cache,
        )
        check_ids(windows, vocab_size=self.model.config.vocab_size)
        return windows

    def batches(self, windows: Any, rows: int, *, shuffle: bool) -> Batches:
        """Return batches of `windows` of similar lengths, each padded to the nearest of a few."""
        longest = -(-int(row_lengths(windows).max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        return Batches(
            windows,
            collate=WindowCollate(self.tokenizer.pad_token_id or 0),
            batch_size=rows,
            seed=self.flags.seed,
            shuffle=shuffle,
            max_length=self.length if self.flags.pad_to_max_length else min(self.length, longest),
            pad_to_max_length=self.flags.pad_to_max_length,
            group_by_length=self.flags.group_by_length,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )

    def held_out(self, questions: Any, rows: int) -> HeldOut:
        """Return the batches of questions that are not learnt from."""
        windows = self.of(questions)
        return HeldOut(self.batches(windows, rows, shuffle=False), Asked(questions, windows))


# Answers.


def answers_of(settings: SpanSettings, outputs: Outputs, asked: Asked) -> Iterator[tuple[str, Answer]]:
    """Yield the id and the answer of each question, in their order, from the logits of all windows."""
    windows = asked.windows.with_format("numpy", columns=["row", "first", "last", "null"])
    rows = np.asarray(windows["row"])
    ends = np.searchsorted(rows, np.arange(len(asked.questions)), side="right")
    place = 0
    for question, end in zip(asked.questions, ends.tolist()):
        scored = []
        for number in range(place, end):
            window = windows[number]
            length = len(window["first"])
            start, stop = (outputs[name][number][:length] for name in ("start_logits", "end_logits"))
            scored.append(ScoredWindow(start, stop, window["first"], window["last"], int(window["null"])))
        place = end
        yield question["id"], answer(question["context"], scored, settings)


def figures_of(settings: SpanSettings, outputs: Outputs, held_out: HeldOut) -> dict[str, float]:
    """Return the loss, and exact match and F1 as the official script has them; with `negative` the best thresholds."""
    asked: Asked = held_out.rows
    weight = sum(map(float, outputs["weight"]))
    values = {"loss": sum(map(float, outputs["loss"])) / weight if weight else float("nan")}
    answers = dict(answers_of(settings, outputs, asked))
    texts = {name: found.text for name, found in answers.items()}
    if not settings.negative:
        return values | squad_v1_scores(texts, asked.references)
    best = {name: found.best for name, found in answers.items()}
    odds = {name: found.null_odds for name, found in answers.items()}
    return values | squad_v2_scores(texts, asked.references) | best_thresholds(best, asked.references, odds)


def write_answers(settings: SpanSettings, folder: Path, prefix: str, outputs: Outputs, held_out: HeldOut) -> None:
    """Write `predictions.json`, `nbest_predictions.json` and, with `negative`, `null_odds.json`, by id."""
    answers = dict(answers_of(settings, outputs, held_out.rows))
    files: dict[str, Mapping[str, Any]] = {
        "predictions": {name: found.text for name, found in answers.items()},
        "nbest_predictions": {name: found.n_best for name, found in answers.items()},
    }
    if settings.negative:
        files["null_odds"] = {name: found.null_odds for name, found in answers.items()}
    for name, content in files.items():
        text = json.dumps(content, indent=4, ensure_ascii=False)
        _folder.replace_text(folder / f"{prefix}{name}.json", text + "\n")


def rows_of(settings: SpanSettings, outputs: Outputs, held_out: HeldOut) -> Iterator[dict[str, Any]]:
    """Yield a row of the table of predictions for each question."""
    for name, found in answers_of(settings, outputs, held_out.rows):
        sure = next((entry["probability"] for entry in found.n_best if entry["text"] == found.text), 0.0)
        row = {"id": name, "prediction_text": found.text, "probability": sure}
        yield row | ({"null_odds": found.null_odds} if settings.negative else {})
