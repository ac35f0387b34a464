"""What pipelines over texts share: the model and its tokenizer, the forms of an input, batches of similar lengths."""

import copy
import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from distaff.core.errors import DataError, UsageError, listed
from distaff.hub import open_tokenizer, resolve

# Rows are padded to one of these and from then on to multiples of the last, so that texts are few programs.
_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Of what comes one by one, so many batches are sorted by length together.
_HELD_BATCHES = 16
_WHERE = ("revision", "token")
_LOADING = ("dtype", "mesh", "attn_implementation")

Row = Mapping[str, Sequence[int]]


def loading_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take from `settings` those that a model is loaded with, and return them as `from_pretrained` has them."""
    given = {name: settings.pop(name, None) for name in _LOADING}
    return {name: value for name, value in given.items() if value is not None}


class TextPipeline:
    """A callable over texts: `model` is a folder, a Hub id, or a model object with its `tokenizer`.

    batch_size: rows that are computed together. dtype: of the computation. mesh: devices to compute on, as a mesh or as
    in `data=2,tensor=4`. attn_implementation: how attention is computed, see docs/parallelism.md. revision, token: of
    the Hub.
    """

    task: ClassVar[str] = ""
    auto_class: ClassVar[Any] = None
    # What a subclass takes besides, with the defaults of its calls.
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model: Any, *, tokenizer: Any = None, batch_size: int = 8, **settings: Any):
        where = {name: settings.pop(name) for name in _WHERE if name in settings}
        loading = loading_settings(settings)
        self.settings = {**self.options, **self.checked(settings)}
        self.batch_size = check_batch_size(batch_size)
        self.folder: Path | None = None
        if isinstance(model, str | os.PathLike):
            self.folder = resolve(str(model), **where)
            model = self.load(self.folder, loading)
        elif where or loading:
            raise UsageError(f"The model is loaded already: leave {' and '.join([*where, *loading])} out.")
        if isinstance(tokenizer, str | os.PathLike):
            tokenizer = open_tokenizer(resolve(tokenizer, weights=False))
        if tokenizer is None and self.folder is None:
            raise UsageError("A model object needs its tokenizer: pass tokenizer=...")
        self.model, self.tokenizer = model, tokenizer or open_tokenizer(self.tokenizer_folder())
        if len(self.tokenizer) > self.model.config.vocab_size:
            raise UsageError(
                f"The tokenizer has {len(self.tokenizer)} tokens and the model a vocab_size of "
                f"{self.model.config.vocab_size}: they do not belong together."
            )

    def load(self, folder: Path, options: dict[str, Any]) -> Any:
        """Return the model of a folder."""
        return self.auto_class.from_pretrained(folder, **options)

    def tokenizer_folder(self) -> Path:
        """Return where the tokenizer lies, if none was given."""
        assert self.folder is not None
        return self.folder

    def resized(self, batch_size: int) -> Self:
        """Return this pipeline with other batches, for a call that says so."""
        other = copy.copy(self)
        other.batch_size = check_batch_size(batch_size)
        return other

    def checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return `options`. Raises `UsageError` for one that the pipeline does not have."""
        for name in options.keys() - self.options.keys():
            has = [*self.options, "tokenizer", "batch_size", *_LOADING, *_WHERE]
            near = difflib.get_close_matches(name, has, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {listed(has)}."
            raise UsageError(f"The {self.task} pipeline has no setting '{name}': {hint}")
        return options

    @property
    def longest_input(self) -> int | None:
        """Tokens of a row at most, special ones among them; None where there is no limit."""
        return getattr(self.model, "longest_input", None)

    def outputs(self, rows: Sequence[Row], name: str, *, of_tokens: bool = True) -> list[np.ndarray]:
        """Return for each row of ids what the model's output `name` has at its tokens, `[tokens, ...]` float32.

        Without `of_tokens` it is what the model says of the row as a whole. Rows of similar lengths are computed
        together; the answer is in the order of `rows`.
        """
        return [values for (values,) in self.several_outputs(rows, (name,), of_tokens=of_tokens)]

    def several_outputs(
        self, rows: Sequence[Row], names: Sequence[str], *, of_tokens: bool = True
    ) -> list[tuple[np.ndarray, ...]]:
        """Return for each row what `outputs` does, of each of the outputs `names`."""
        found: list[Any] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            arrays = self.padded([rows[index] for index in chosen])
            said = self.model(**arrays)
            values = [np.asarray(said[name], np.float32) for name in names]
            for place, index in enumerate(chosen):
                length = len(rows[index]["input_ids"])
                found[index] = tuple(each[place][:length] if of_tokens else each[place] for each in values)
        return found

    def padded(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Return `rows` and their attention mask as arrays [rows or more, bucket] int32."""
        longest = max(len(row["input_ids"]) for row in rows)
        length = length_of(longest, self.longest_input)
        count = min(self.batch_size, 1 << (len(rows) - 1).bit_length())
        rows = [*rows, *[rows[0]] * (count - len(rows))]
        pad_id = self.tokenizer.pad_token_id or 0
        arrays = {}
        for name in rows[0]:
            fill = pad_id if name == "input_ids" else 0
            arrays[name] = np.array([[*row[name], *[fill] * (length - len(row[name]))] for row in rows], np.int32)
        lengths = np.array([len(row["input_ids"]) for row in rows])
        arrays["attention_mask"] = (np.arange(length)[None] < lengths[:, None]).astype(np.int32)
        return arrays

    def too_long(self, text: str, tokens: int) -> DataError:
        """Return the error for a text that the model has no positions for."""
        return DataError(
            f"A text of {tokens} tokens ({text[:40]!r}...) is longer than the {self.longest_input} of the model: "
            "shorten it, or pass truncation=True."
        )


def check_batch_size(batch_size: int) -> int:
    """Return `batch_size`. Raises `UsageError` for one that cannot be."""
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size} and must be at least 1.")
    return batch_size


def length_of(longest: int, limit: int | None) -> int:
    """Return what rows are padded to whose longest has `longest` tokens."""
    step = _LENGTHS[-1]
    length = next((each for each in _LENGTHS if each >= longest), -(-longest // step) * step)
    return length if limit is None else max(longest, min(length, limit))


def answers(inputs: Any, many: Callable[[list[Any]], list[Any]], *, one: type | tuple[type, ...], held: int) -> Any:
    """Return what `many` answers: one answer for one input, a list for a sequence, an iterator for what yields inputs.

    Args:
        inputs: an input (an instance of `one`), a sequence of them, a `Path` of a file of texts (as `read_texts` reads
            them), or an iterator, of which `held` times 16 inputs are taken at a time.
        many: from a list of inputs to their answers.
    """
    if isinstance(inputs, one):
        return many([inputs])[0]
    if isinstance(inputs, Path):
        from distaff.data.files import expand_files, read_texts

        (path,) = expand_files([str(inputs)])
        return _by_parts(read_texts(path), many, held)
    if isinstance(inputs, Sequence):
        return many(list(inputs))
    if isinstance(inputs, Iterable) and not isinstance(inputs, Mapping):
        return _by_parts(inputs, many, held)
    raise UsageError(
        f"An input of type {type(inputs).__name__} is neither a text nor several: pass a string or a list."
    )


def _by_parts(inputs: Iterable[Any], many: Callable[[list[Any]], list[Any]], held: int) -> Iterator[Any]:
    rest = iter(inputs)
    while part := list(itertools.islice(rest, held * _HELD_BATCHES)):
        yield from many(part)


def check_texts(texts: Sequence[Any]) -> None:
    """Raise `DataError` for what is no text."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"Input {number} is of type {type(text).__name__} ({str(text)[:40]!r}), not a string.")
        check_characters(text, f"Input {number}")


def check_characters(text: str, place: str) -> None:
    """Raise `DataError` for half of a surrogate pair, which tokenizers take for no string at all."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise DataError(f"{place} holds half of a surrogate pair ({half!r}), no character: take it out.") from error
