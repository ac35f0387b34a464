"""What XLA says when devices have too little memory, in one sentence."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from distaff.core.errors import DistaffError

REMEDIES = (
    "take fewer rows at a time (a smaller --per_device_train_batch_size with more --gradient_accumulation_steps), "
    "compute layers again (--gradient_checkpointing full --scan_layers), share the model out (--mesh fsdp=-1) or keep "
    "smaller moments (--moment_dtype bfloat16); 'distaff fit' tells before a run what fits"
)
# The size that was asked for, and the one that there is where the compiler or the allocator says it.
_SIZE = r"([\d.]+) ?([KMGT]?)(?:i?B|bytes)?\b"
_MESSAGES = tuple(
    re.compile(text)
    for text in (
        rf"[Uu]sed {_SIZE} of {_SIZE} hbm",  # TPU, compiling, until 2024
        rf"required for [\w ]+ \({_SIZE}\) exceeds available HBM \({_SIZE}\)",  # TPU, compiling
        rf"Attempting to (?:reserve|allocate) {_SIZE}[^.]*?\. That was not possible\. There are {_SIZE} free",
        rf"Attempting to (?:reserve|allocate) {_SIZE}",
        rf"Failed to allocate request for {_SIZE}",  # GPU, running
        rf"[Oo]ut of memory (?:while trying to allocate|allocating) {_SIZE}",  # GPU and CPU
    )
)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
GIB = 2**30


class OutOfMemoryError(DistaffError):
    """The devices have too little memory for what was asked."""


@dataclass(frozen=True)
class Exhausted:
    """Bytes of a device that were asked for and that there are; None where XLA does not say so."""

    asked: int | None = None
    there: int | None = None

    def __str__(self) -> str:
        if self.asked is None:
            return "XLA does not say how much is missing"
        there = "" if self.there is None else f" of {self.there / GIB:,.2f} GiB"
        return f"{self.asked / GIB:,.2f} GiB were asked for{there}"


def exhausted(error: BaseException) -> Exhausted | None:
    """Return the sizes that an error of XLA names, None for one that is not about memory."""
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in text:
        return None
    for message in _MESSAGES:
        if found := message.search(text):
            sizes = found.groups()
            return Exhausted(*(_bytes(number, unit) for number, unit in zip(sizes[::2], sizes[1::2])))
    return Exhausted()


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 2 ** _UNITS[unit])


@contextlib.contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn XLA's errors of memory into an `OutOfMemoryError` that says sizes and remedies; `what` had no room."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        found = exhausted(error)
        if found is None:
            raise
        raise OutOfMemoryError(f"A device has no room for {what} ({found}): {REMEDIES}.") from error
