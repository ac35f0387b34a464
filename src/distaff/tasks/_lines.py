"""Texts from outside for commands that answer them: lines of a file or of standard input, and words of the command."""

from collections.abc import Iterable, Iterator

from distaff.core.errors import DataError


def lines_of(file: Iterable[str], name: str) -> Iterator[str]:
    """Yield the lines of `file` that are not blank, as they come. Raises `DataError` for bytes of another encoding."""
    try:
        for line in file:
            if line.strip():
                yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not {error.encoding} (byte 0x{error.object[error.start]:02x}): convert it, for instance with "
            "'iconv -t utf-8'."
        ) from error


def check_words(texts: Iterable[str]) -> None:
    """Raise `DataError` for words of the command line that were bytes of another encoding."""
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"The text {text!r} is not UTF-8: convert it, for instance with 'iconv -t utf-8'.")
