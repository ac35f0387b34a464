"""Documents that are joined by an eos token: for causal models, and for what is cut out of long text."""

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tokenizers import decoders, processors

from distaff.core.errors import DataError, DistaffError, UsageError
from distaff.data.files import expand_files, read_lines, read_texts

logger = logging.getLogger(__name__)

# A .txt file is read in pieces of about so many characters, so that memory does not grow with the file.
_PIECE = 4096


def load_documents(
    files: str | Sequence[str],
    *,
    eos_token: str,
    text_column: str | None = None,
    max_samples: int | None = None,
    cache_dir: str | os.PathLike | None = None,
    streaming: bool = False,
) -> Any:
    """Return a dataset with the one column "text", in which `eos_token` stands at the end of each document.

    A .txt file is one document with its line breaks, in several rows of whole lines; a row of any other file is one.
    `max_samples` counts rows.
    """
    paths = [str(path) for path in expand_files(files)]
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"{max_samples} samples leave nothing to read: the limit must be at least 1.")
    arguments: dict[str, Any] = {"paths": paths, "column": text_column, "eos": eos_token}
    features = datasets.Features({"text": datasets.Value("string")})
    if streaming:
        texts = datasets.IterableDataset.from_generator(_generate, features=features, gen_kwargs=arguments)
        return texts if max_samples is None else texts.take(max_samples)
    # Size and time of change are part of the cache's name.
    arguments["stats"] = tuple((Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in paths)
    folder = None if cache_dir is None else str(cache_dir)
    try:
        texts = datasets.Dataset.from_generator(_generate, features=features, gen_kwargs=arguments, cache_dir=folder)
    except datasets.exceptions.DatasetGenerationError as error:
        # What was wrong with a file, without what `datasets` says around it.
        raise error.__cause__ if isinstance(error.__cause__, DistaffError) else error from None
    return texts if max_samples is None else texts.select(range(min(max_samples, len(texts))))


def _generate(paths: list[str], column: str | None, eos: str, stats: tuple = ()) -> Iterator[dict[str, str]]:
    for path in paths:
        for text in _documents(Path(path), column, eos):
            yield {"text": text}


def _documents(path: Path, column: str | None, eos: str) -> Iterator[str]:
    if path.suffix.lower() == ".txt":
        yield from _pieces(path, column, eos)
    else:
        for text in read_texts(path, column=column):
            yield text + eos


def _pieces(path: Path, column: str | None, eos: str) -> Iterator[str]:
    held: list[str] = []
    size = count = words = 0
    try:
        for count, line in read_lines(path, column=column):
            written = bool(line.strip())
            # Cut in front of a line break: there byte-level tokenizers cut as well, so no token is lost by it.
            if size >= _PIECE and written:
                yield "".join(held)
                held, size = [], 0
            held.append(line if count == 1 else f"\n{line}")
            size += len(held[-1])
            words += written
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    if not words:
        raise DataError(f"'{path}' has no text: {count} blank rows and nothing else.")
    yield "".join(held).rstrip("\n") + eos


def check_joining(tokenizer: Any) -> None:
    """Raise `UsageError` where `tokenizer` cannot join documents."""
    if not tokenizer.is_fast:
        raise UsageError(f"Joining documents needs a fast tokenizer, which {type(tokenizer).__name__} is not.")
    if tokenizer.eos_token is None:
        raise UsageError(
            f"The tokenizer '{tokenizer.name_or_path}' has no eos token, which ends documents: choose another, or "
            "train one with 'distaff tokenizer train'."
        )


def joining_tokenizer(tokenizer: Any, *, add_eos: bool = True) -> Any:
    """Return a copy of `tokenizer` that puts nothing around a text but, with `add_eos`, the eos token behind it."""
    check_joining(tokenizer)
    joining = copy.deepcopy(tokenizer)
    around = ["$A", tokenizer.eos_token] if add_eos else ["$A"]
    joining.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)]
    )
    return joining


def prompting_tokenizer(tokenizer: Any) -> Any:
    """Return `tokenizer` for a model of joined documents: one that ends each text, like RoBERTa's, no longer does.

    Neither then does it begin them: the model has seen no token for that.
    """
    ends = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    return joining_tokenizer(tokenizer, add_eos=False) if ends else tokenizer


def token_characters(tokenizer: Any) -> np.ndarray:
    """Return how many characters of a text each token stands for, [vocab] float32; special tokens stand for none.

    In a byte-level vocabulary a character belongs to the token that holds its first byte.
    """
    counts = np.zeros(len(tokenizer), np.float32)
    byte_level = tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    special = set(tokenizer.all_special_ids)
    for token, index in tokenizer.get_vocab().items():
        added = tokenizer.added_tokens_decoder.get(index)
        if index in special or (added is not None and added.special):
            continue
        if byte_level and added is None:
            counts[index] = sum(character not in _CONTINUATIONS for character in token)
        else:
            counts[index] = len(token.removeprefix("##"))
    return counts


def _continuations() -> frozenset[str]:
    """Return the characters by which byte-level vocabularies write the bytes 0x80 to 0xBF, which begin no character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    written = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}
    return frozenset(written[byte] for byte in range(0x80, 0xC0))


_CONTINUATIONS = _continuations()
