"""question-answering as a call: `pipeline("question-answering", "folder")(question="Who?", context="...")`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distaff.core.errors import DataError, UsageError
from distaff.data.files import expand_files
from distaff.data.questions import Question, read_questions
from distaff.data.windows import Window, check_windows, cut_windows
from distaff.models.auto import FlaxAutoModelForQuestionAnswering
from distaff.pipeline_base import TextPipeline, answers, check_characters

# What Transformers takes where the tokenizer allows it.
_SEQUENCE, _STRIDE = 384, 128
# What the softmax sees where no answer can be, as in Transformers.
_FORBIDDEN = -10000.0


@dataclass(frozen=True)
class QuestionOptions:
    """What a call may say, by the names of Transformers.

    top_k: answers to a question. max_answer_len: of an answer, max_question_len: of a question, max_seq_len: of a row,
    all in tokens, and a row never longer than the model allows. doc_stride: tokens that two windows share.
    handle_impossible_answer: there may be no answer, which is the empty one. align_to_words: answers are whole words.
    """

    top_k: int = 1
    doc_stride: int | None = None
    max_answer_len: int = 15
    max_seq_len: int | None = None
    max_question_len: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True

    def __post_init__(self) -> None:
        for name in ("top_k", "max_answer_len", "max_seq_len", "max_question_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1.")


class QuestionAnsweringPipeline(TextPipeline):
    """Finds the part of a context that answers a question. Settings that calls take too are their defaults."""

    task = "question-answering"
    auto_class = FlaxAutoModelForQuestionAnswering
    options = asdict(QuestionOptions())

    def __init__(self, model: Any, **settings: Any):
        super().__init__(model, **settings)
        QuestionOptions(**self.settings)  # what cannot be is refused before the first call

    def __call__(
        self,
        *inputs: Any,
        question: str | Sequence[str] | None = None,
        context: str | Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        """Return `{"score", "start", "end", "answer"}`, or with `top_k` above 1 a list of them, best first.

        `start` and `end` are characters of the context. A question and its context are given as `question=` and
        `context=`, as two texts, or as `{"question": ..., "context": ...}`. Several, as lists of texts or of such
        objects, give a list; one text beside a list is meant for all. An iterator of objects, or the `Path` of a file
        of questions, gives an iterator. Further `options`: see `QuestionOptions`.

        Raises `DataError` for a question or a context that is missing or empty.
        """
        if "batch_size" in options:
            return self.resized(options.pop("batch_size"))(*inputs, question=question, context=context, **options)
        chosen = QuestionOptions(**{**self.settings, **self.checked(options)})
        records = _records(inputs, question, context)
        return answers(records, lambda several: self._answer(several, chosen), one=Mapping, held=self.batch_size)

    def _answer(self, records: list[Any], options: QuestionOptions) -> list[Any]:
        if not records:
            return []
        examples = [_pair(record, f"Input {number}") for number, record in enumerate(records)]
        most = min(self.tokenizer.model_max_length, self.longest_input or _SEQUENCE)
        length = min(most, options.max_seq_len or _SEQUENCE)
        stride = min(length // 2, _STRIDE) if options.doc_stride is None else options.doc_stride
        check_windows(self.tokenizer, max_length=length, stride=stride)
        windows, _ = cut_windows(
            self.tokenizer,
            *zip(*examples),
            max_length=length,
            stride=stride,
            max_question_length=options.max_question_len,
        )
        for window in windows:
            if not window.context.any():
                raise DataError(f"Input {window.row} has a context without tokens ({examples[window.row][1][:40]!r}).")
        found: list[list[tuple[Window, np.ndarray, np.ndarray]]] = [[] for _ in examples]
        logits = self.several_outputs([self._row(window) for window in windows], ("start_logits", "end_logits"))
        for window, (start, end) in zip(windows, logits):
            found[window.row].append((window, start, end))
        best = [_best(context, scored, options) for (_, context), scored in zip(examples, found)]
        return best if options.top_k > 1 else [each[0] for each in best]

    def _row(self, window: Window) -> dict[str, list[int]]:
        types = takes_token_types(self.model, self.tokenizer)
        row = {"input_ids": window.encoding.ids}
        return row | ({"token_type_ids": window.encoding.type_ids} if types else {})


def takes_token_types(model: Any, tokenizer: Any) -> bool:
    """Tell whether the tokenizer gives and the model reads token types, which tell question and context apart."""
    return "token_type_ids" in tokenizer.model_input_names and getattr(model.config, "type_vocab_size", 0) > 1


# Inputs.


def _records(inputs: tuple[Any, ...], question: Any, context: Any) -> Any:
    """Return what was asked as an object, a list of objects, or an iterator of objects."""
    if inputs and (question is not None or context is not None):
        raise UsageError("Questions and contexts are given twice: pass them as question= and context= alone.")
    if len(inputs) == 2 and all(isinstance(each, str) for each in inputs):
        question, context = inputs
    elif len(inputs) == 1 and isinstance(inputs[0], Path):
        return ({"question": each.question, "context": each.context} for each in _of_file(inputs[0]))
    elif len(inputs) == 1 and isinstance(inputs[0], Iterable) and not isinstance(inputs[0], str):
        return inputs[0]
    elif inputs:
        raise UsageError("Give question= and context=, or objects with 'question' and 'context'.")
    lists = [each for each in (question, context) if isinstance(each, list | tuple)]
    if not lists:
        return {"question": question, "context": context}
    if len(lists[0]) != len(lists[-1]):
        raise UsageError(f"{len(question)} questions and {len(context)} contexts: give each question its context.")
    count = len(lists[0])
    columns = [each if isinstance(each, list | tuple) else [each] * count for each in (question, context)]
    return [{"question": one, "context": two} for one, two in zip(*columns)]


def _of_file(path: Path) -> Iterator[Question]:
    (file,) = expand_files([str(path)])
    return read_questions(file, need_answers=False)


def _pair(record: Any, place: str) -> tuple[str, str]:
    if not isinstance(record, Mapping):
        raise DataError(f"{place} is of type {type(record).__name__}: give an object with 'question' and 'context'.")
    for name in ("question", "context"):
        if record.get(name) is None:
            raise DataError(f"{place} has no {name}: give an object with 'question' and 'context'.")
        if not isinstance(record[name], str) or not record[name].strip():
            raise DataError(f"{place}: the {name} is {record[name]!r}, which is no text.")
        check_characters(record[name], place)
    return record["question"], record["context"]


# Answers.


def _best(
    context: str, scored: list[tuple[Window, np.ndarray, np.ndarray]], options: QuestionOptions
) -> list[dict[str, Any]]:
    """Return the best answers from windows with their logits; what several spans and windows say adds up."""
    merged: dict[str, dict[str, Any]] = {}
    null = np.inf
    # Several spans may be parts of the same words.
    count = 2 * options.top_k + 10 if options.align_to_words else options.top_k
    for window, start, end in scored:
        first, last = (_probabilities(window, logits) for logits in (start, end))
        null = min(null, float(first[window.null] * last[window.null]))
        offsets = window.offsets
        for one, two, score in _spans(window, first, last, count, options.max_answer_len):
            begin, stop = _characters(window, offsets, one, two, words=options.align_to_words)
            # Some tokenizers count the space before a word as a part of it.
            begin, text = begin + _leading(context[begin:stop]), context[begin:stop].strip()
            stop = begin + len(text)
            known = merged.setdefault(text.lower(), {"score": 0.0, "start": begin, "end": stop, "answer": text})
            known["score"] += score
    found = list(merged.values())
    if options.handle_impossible_answer:
        found.append({"score": null, "start": 0, "end": 0, "answer": ""})
    return sorted(found, key=lambda each: each["score"], reverse=True)[: options.top_k]


def _probabilities(window: Window, logits: np.ndarray) -> np.ndarray:
    """Return `[length]`: how likely each token of the context, or "no answer", is."""
    allowed = window.context.copy()
    allowed[window.null] = True
    held = np.where(allowed, logits.astype(np.float64), _FORBIDDEN)
    weights = np.exp(held - held.max())
    return weights / weights.sum()


def _spans(
    window: Window, first: np.ndarray, last: np.ndarray, count: int, longest: int
) -> list[tuple[int, int, float]]:
    """Return the best `count` spans of the context: their tokens, the last included, and their probability."""
    valid = np.tril(np.triu(np.outer(window.context, window.context)), longest - 1)  # [start, end]
    scores = np.where(valid, np.outer(first, last), -1.0)
    best = np.argsort(-scores, axis=None, kind="stable")[:count]
    spans = (divmod(int(place), len(first)) for place in best)
    return [(one, two, float(scores[one, two])) for one, two in spans if valid[one, two]]


def _leading(text: str) -> int:
    """Return how many spaces a text begins with, none where it has nothing else."""
    return len(text) - len(text.lstrip()) if text.strip() else 0


def _characters(window: Window, offsets: np.ndarray, one: int, two: int, *, words: bool) -> tuple[int, int]:
    """Return where in the context a span of tokens begins and ends, or the words do that it touches."""
    ids = window.encoding.word_ids
    if words and ids[one] is not None and ids[two] is not None:
        while one > 0 and window.context[one - 1] and ids[one - 1] == ids[one]:
            one -= 1
        while two + 1 < len(ids) and window.context[two + 1] and ids[two + 1] == ids[two]:
            two += 1
    return int(offsets[one, 0]), int(offsets[two, 1])
