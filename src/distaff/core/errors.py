"""The exceptions of distaff.

Each message is one sentence that holds what was wrong, where, and what to do about it. The command line prints it
without a traceback and exits with `exit_code`.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

# What a file system answers wherever something is written to it: full, a quota, a limit, mounted to be read alone.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


class DistaffError(Exception):
    """Something outside the program is wrong: a file, a row, a checkpoint, the network."""

    exit_code = 1


class UsageError(DistaffError):
    """What was asked for cannot be done as asked: a flag, an argument, a combination of them."""

    exit_code = 2


class ConfigError(UsageError):
    """A model config holds a field or a value that the family does not implement."""


class DataError(DistaffError):
    """An input file or a row of it cannot be used."""


class CheckpointError(DistaffError):
    """Weights on disk do not fit the model, are incomplete, or cannot be read."""


class MissingExtraError(UsageError):
    """An optional dependency is needed and not installed."""

    def __init__(self, module: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs '{module}', which is not installed: pip install 'distaff[{extra}]'.")


def listed(items, limit: int = 20) -> str:
    """Return `items` joined for a message, cut after `limit` with the count of what was left out."""
    names = [str(item) for item in items]
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text}, and {len(names) - limit} more"


@contextmanager
def endings_named() -> Iterator[None]:
    """Raise what ended the block even where cleaning up after it failed too.

    That is an interrupt, or a disk that takes nothing more, which may come wherever something is written and becomes a
    `DistaffError`.
    """
    try:
        yield
    except DistaffError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            if isinstance(cause, OSError) and cause.errno in UNWRITABLE:
                what = f"'{cause.filename}'" if cause.filename else "A file"
                raise DistaffError(
                    f"{what} cannot be written ({os.strerror(cause.errno)}): make room or name another folder; a "
                    "training goes on with --resume_from_checkpoint."
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise
