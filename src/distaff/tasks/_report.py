"""What `distaff fit` prints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distaff.tasks._slices import GIB
from distaff.train.collectives import Collective
from distaff.train.footprint import Footprint

_PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "average": "average of parameters",
    "carried": "running statistics",
    "batch": "batch",
    "temporary": "activations, gradients, others",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A compiled step.

    kind: of the devices. mesh: its sizes. local: devices a process. rows: of a step. tokens: a row, by stack. flops: of
    a step, None where nobody counts them. parameters: how many. able: flags that would save memory.
    """

    footprint: Footprint
    kind: str
    mesh: Mapping[str, int]
    local: int
    rows: int
    tokens: Mapping[str, int]
    flops: float | None
    parameters: int
    able: frozenset[str]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Answer":
        """Return the answer that the process has written."""
        found = values["footprint"]
        every = tuple(Collective(**each) for each in found["collectives"])
        print_ = Footprint(**{**found, "collectives": every})
        return cls(**{**values, "footprint": print_, "able": frozenset(values["able"])})

    @property
    def needed(self) -> int:
        """Bytes of a device, at least."""
        return self.footprint.held if self.footprint.peak is None else self.footprint.peak

    def fits(self, limit: int | None) -> bool:
        """Tell whether a device of `limit` bytes is enough."""
        return self.footprint.limit is None and (limit is None or self.needed <= limit)


def show(name: str, where: str, answer: Answer, limit: int | None) -> None:
    """Print what a step is and needs."""
    mesh = ",".join(f"{axis}={size}" for axis, size in answer.mesh.items())
    print(f"{name} on {where} ({answer.kind}), mesh {mesh}: {answer.parameters:,} parameters")
    print(_step(answer))
    for line in sizes(answer, limit):
        print(line)
    for line in _collectives(answer):
        print(line)


def _step(answer: Answer) -> str:
    """Say in a line what a step consists of."""
    parts = [f"a step: {answer.rows:,} rows"]
    if answer.tokens:
        each = " and ".join(f"{count:,} tokens{f' ({part})' if part else ''}" for part, count in answer.tokens.items())
        parts.append(f"of {each}, {answer.rows * sum(answer.tokens.values()):,} tokens in all")
    if answer.flops is not None:
        parts.append(f"- {answer.flops / 1e12:,.4g} TFLOP without what is computed again")
    return " ".join(parts)


def sizes(answer: Answer, limit: int | None) -> Iterator[str]:
    """Yield lines of the memory of a device."""
    print_ = answer.footprint
    yield f"{'on each device':<32}{'GiB':>10}"
    for name, title in _PARTS.items():
        size = getattr(print_, name)
        if size is not None and (size or name not in ("average", "carried")):
            yield f"  {title:<30}{gib(size):>10}"
    if print_.peak is None:
        yield f"  {'these alone':<30}{gib(print_.held):>10}  {_verdict(answer, limit)}"
    else:
        yield f"  {'peak':<30}{gib(print_.peak):>10}  {_verdict(answer, limit)}"


def _verdict(answer: Answer, limit: int | None) -> str:
    there = answer.footprint.limit or limit
    if there is None:
        return "(nobody says how much there is: --device_memory)"
    return f"of {gib(there)}: {'fits' if answer.fits(limit) else 'does not fit'}"


def _collectives(answer: Answer) -> Iterator[str]:
    if answer.footprint.limit is not None:
        return
    found = answer.footprint.collectives
    yield f"{'sent in a step':<32}{'times':>10}{'MiB in all':>14}" if found else "nothing is sent in a step"
    for each in found:
        more = f"  (in {each.uncounted} loop(s) of unknown length, once each)" if each.uncounted else ""
        yield f"  {each.kind:<30}{each.count:>10,}{each.bytes / 2**20:>14,.1f}{more}"


def gib(size: int) -> str:
    """Return a size in GiB, with enough digits for small ones."""
    return f"{size / GIB:,.2f}" if size >= GIB / 10 else f"{size / GIB:.5f}"
