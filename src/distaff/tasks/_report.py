"""What `distaff fit` prints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distaff.tasks._slices import GIB
from distaff.train.collectives import Collective
from distaff.train.footprint import WAITING_BATCHES, Footprint

_PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "average": "average of parameters",
    "carried": "running statistics",
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
        found = Footprint(**{**found, "collectives": every})
        return cls(**{**values, "footprint": found, "able": frozenset(values["able"])})

    def fits(self, limit: int | None) -> bool:
        """Tell whether a device of `limit` bytes is enough."""
        return self.footprint.limit is None and (limit is None or self.footprint.needed <= limit)


def show(name: str, where: str, answer: Answer, limit: int | None) -> None:
    """Print what a step is and needs."""
    mesh = ",".join(f"{axis}={size}" for axis, size in answer.mesh.items())
    print(f"{name} on {where} ({answer.kind}), mesh {mesh}: {answer.parameters:,} parameters")
    print(_step(answer))
    for line in lines(answer, limit):
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


def lines(answer: Answer, limit: int | None) -> Iterator[str]:
    """Yield what is to be said of the memory of a device, and of what is sent."""
    found = answer.footprint
    yield f"{'on each device':<32}{'GiB':>10}"
    parts = {title: getattr(found, name) for name, title in _PARTS.items() if getattr(found, name)}
    parts[f"batch, and {WAITING_BATCHES} that wait"] = found.batch * (1 + WAITING_BATCHES)
    parts["peak" if found.peak is not None else "these alone"] = found.needed
    for title, size in parts.items():
        yield f"  {title:<30}{gib(size):>10}"
    yield f"  {_verdict(answer, limit)}"
    yield from _collectives(answer)


def _verdict(answer: Answer, limit: int | None) -> str:
    there = answer.footprint.limit or limit
    if there is None:
        return "nobody says how much a device has: --device_memory does"
    return f"{'fits' if answer.fits(limit) else 'does not fit'} the {gib(there)} GiB of a device"


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
