"""question-answering as a call: `pipeline("question-answering", "folder")(question="Who?", context="...")`."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.windows import Window, check_windows, cut_windows
from distaff.hub import open_tokenizer, resolve
from distaff.models.auto import FlaxAutoModelForQuestionAnswering

# Rows are padded to a multiple of this, so that texts of many lengths are few programs.
_LENGTH_MULTIPLE = 32
# What Transformers takes where the tokenizer allows it.
_SEQUENCE, _STRIDE = 384, 128
# What the softmax sees where no answer can be, as in Transformers.
_FORBIDDEN = -10000.0


@dataclass(frozen=True)
class QuestionOptions:
    """What a call may say, by the names of Transformers.

    top_k: answers to a question. max_answer_len: of an answer, max_question_len: of a question, max_seq_len: of a row,
    all in tokens; doc_stride: tokens that two windows share. handle_impossible_answer: there may be no answer, which is
    the empty one. align_to_words: answers are whole words.
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


class QuestionAnsweringPipeline:
    """Finds the part of a context that answers a question.

    `model` is a folder, a Hub id, or a model object with its `tokenizer`; further settings are defaults of calls.
    """

    task = "question-answering"

    def __init__(self, model: Any, *, tokenizer: Any = None, batch_size: int = 8, dtype: Any = None, **settings: Any):
        where = {name: settings.pop(name) for name in ("revision", "token") if name in settings}
        self.options = _with(QuestionOptions(), settings)
        if isinstance(model, str) or not hasattr(model, "module"):
            folder = resolve(str(model), **where)
            tokenizer = tokenizer or open_tokenizer(folder)
            model = FlaxAutoModelForQuestionAnswering.from_pretrained(
                folder, **({} if dtype is None else {"dtype": dtype})
            )
        if tokenizer is None:
            raise UsageError("A model object needs its tokenizer: pass tokenizer=...")
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size} and must be at least 1.")
        if len(tokenizer) > model.config.vocab_size:
            raise UsageError(
                f"The tokenizer has {len(tokenizer)} tokens and the model a vocab_size of {model.config.vocab_size}: "
                "they do not belong together."
            )
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size

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
        objects, give a list; one text beside a list is meant for all. Further `options`: see `QuestionOptions`.

        Raises `DataError` for a question or a context that is missing or empty.
        """
        chosen = _with(self.options, options)
        examples, several = _examples(inputs, question, context)
        answers = self._answer(examples, chosen)
        found = answers if chosen.top_k > 1 else [each[0] for each in answers]
        return found if several else found[0]

    def _answer(self, examples: list[tuple[str, str]], options: QuestionOptions) -> list[list[dict[str, Any]]]:
        longest = getattr(self.model, "longest_input", None) or _SEQUENCE
        most = min(self.tokenizer.model_max_length, longest)
        length = min(most, options.max_seq_len or _SEQUENCE)
        stride = min(length // 2, _STRIDE) if options.doc_stride is None else options.doc_stride
        check_windows(self.tokenizer, max_length=length, stride=stride)
        windows, _ = cut_windows(
            self.tokenizer,
            [question for question, _ in examples],
            [context for _, context in examples],
            max_length=length,
            stride=stride,
            max_question_length=options.max_question_len,
        )
        for window in windows:
            if not window.context.any():
                raise DataError(f"Input {window.row} has a context without tokens ({examples[window.row][1][:40]!r}).")
        found: list[list[tuple[Window, np.ndarray, np.ndarray]]] = [[] for _ in examples]
        for window, (start, end) in zip(windows, self._logits(windows, longest)):
            found[window.row].append((window, start, end))
        return [_best(context, scored, options) for (_, context), scored in zip(examples, found)]

    def _logits(self, windows: list[Window], longest: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return logits of start and end for each window, `[length]` each; windows of like length go together."""
        results: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        order = sorted(range(len(windows)), key=lambda place: len(windows[place].encoding))
        for first in range(0, len(order), self.batch_size):
            places = order[first : first + self.batch_size]
            outputs = self.model(**self._batch([windows[place] for place in places], longest))
            starts, ends = (np.asarray(logits, np.float32) for logits in (outputs.start_logits, outputs.end_logits))
            for row, place in enumerate(places):
                length = len(windows[place].encoding)
                results[place] = starts[row, :length], ends[row, :length]
        return [results[place] for place in range(len(windows))]

    def _batch(self, windows: list[Window], longest: int) -> dict[str, np.ndarray]:
        """Return ids, mask and types `[rows, length]`; rows are a power of two, filled up with copies of the first."""
        width = max(len(window.encoding) for window in windows)
        width = min(-(-width // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, max(longest, width))
        rows = 1 << (len(windows) - 1).bit_length()
        pad = self.tokenizer.pad_token_id or 0
        ids, mask, types = (np.full((rows, width), fill, np.int32) for fill in (pad, 0, 0))
        for row in range(rows):
            encoding = windows[row if row < len(windows) else 0].encoding
            ids[row, : len(encoding)], mask[row, : len(encoding)] = encoding.ids, 1
            types[row, : len(encoding)] = encoding.type_ids
        batch = {"input_ids": ids, "attention_mask": mask}
        return batch | ({"token_type_ids": types} if takes_token_types(self.model, self.tokenizer) else {})


def takes_token_types(model: Any, tokenizer: Any) -> bool:
    """Tell whether the tokenizer gives and the model reads token types, which tell question and context apart."""
    return "token_type_ids" in tokenizer.model_input_names and getattr(model.config, "type_vocab_size", 0) > 1


def _with(options: QuestionOptions, changes: dict[str, Any]) -> QuestionOptions:
    known = [each.name for each in fields(QuestionOptions)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name.replace("topk", "top_k"), known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {listed(known)}."
            raise UsageError(f"The question-answering pipeline has no setting '{name}': {hint}")
    return replace(options, **changes)


# Inputs.


def _examples(inputs: tuple[Any, ...], question: Any, context: Any) -> tuple[list[tuple[str, str]], bool]:
    """Return pairs of question and context, and whether several were asked for."""
    if inputs and (question is not None or context is not None):
        raise UsageError("Questions and contexts are given twice: pass them as question= and context= alone.")
    if len(inputs) == 2 and all(isinstance(each, str) for each in inputs):
        question, context = inputs
    elif len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return [_pair(inputs[0], "The input")], False
    elif len(inputs) == 1 and isinstance(inputs[0], Iterable) and not isinstance(inputs[0], str):
        return [_pair(each, f"Input {number}") for number, each in enumerate(inputs[0])], True
    elif inputs:
        raise UsageError("Give question= and context=, or objects with 'question' and 'context'.")
    several = isinstance(question, list | tuple) or isinstance(context, list | tuple)
    if not several:
        return [_pair({"question": question, "context": context}, "The input")], False
    counts = {len(each) for each in (question, context) if isinstance(each, list | tuple)}
    if len(counts) > 1:
        raise UsageError(f"{len(question)} questions and {len(context)} contexts: give each question its context.")
    count = counts.pop()
    columns = [each if isinstance(each, list | tuple) else [each] * count for each in (question, context)]
    return [
        _pair({"question": one, "context": two}, f"Input {number}") for number, (one, two) in enumerate(zip(*columns))
    ], True


def _pair(record: Any, place: str) -> tuple[str, str]:
    if not isinstance(record, Mapping):
        raise DataError(f"{place} is of type {type(record).__name__}: give an object with 'question' and 'context'.")
    for name in ("question", "context"):
        if record.get(name) is None:
            raise DataError(f"{place} has no {name}: give an object with 'question' and 'context'.")
        if not isinstance(record[name], str) or not record[name].strip():
            raise DataError(f"{place}: the {name} is {record[name]!r}, which is no text.")
    return record["question"], record["context"]


# Answers.


def _best(
    context: str, scored: list[tuple[Window, np.ndarray, np.ndarray]], options: QuestionOptions
) -> list[dict[str, Any]]:
    """Return the best answers from windows with their logits; what several spans and windows say adds up."""
    answers: dict[str, dict[str, Any]] = {}
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
            known = answers.setdefault(text.lower(), {"score": 0.0, "start": begin, "end": stop, "answer": text})
            known["score"] += score
    found = list(answers.values())
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
