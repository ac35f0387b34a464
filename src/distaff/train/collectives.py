"""What devices send each other in a compiled program, read from its text."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COLLECTIVE = re.compile(rf" = (?P<shape>.+?) (?P<kind>ragged-all-to-all|{'|'.join(KINDS)})(?P<start>-start)?\(")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_LOOP = re.compile(r" while\(.*condition=%?(?P<condition>[\w.\-]+), body=%?(?P<body>[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BOUND = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_ARRAY = re.compile(r"\b(pred|bf16|[cfsu]\d+|f8\w*)\[([\d,]*)\]")
# TPU's compiler spreads one gather over several fusions; its text stands in each of them, under one number.
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
# What else refers to the computation of an asynchronous operation that was counted where it starts.
_CONTINUED = re.compile(r" async-(?:update|done)\(")
# TPU's compiler writes a reduction of which each device keeps its part as a fusion of this name around a whole one.
_SCATTERED = "all-reduce-scatter"


@dataclass(frozen=True)
class Collective:
    """One kind of collective operation of a step.

    count: how often it is done. bytes: of the whole arrays that are reduced, gathered, scattered or sent, for all times
    together. largest: of one time. uncounted: loops of unknown length that have some, which count as one pass.
    """

    kind: str
    count: int
    bytes: int
    largest: int
    uncounted: int = 0


@dataclass
class _Computation:
    """What stands in a computation: its own collectives, as kind, bytes and chain, and what it calls how often."""

    name: str
    found: list[tuple[str, int, tuple[str, str] | None]] = field(default_factory=list)
    calls: list[tuple[str, int, bool]] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)


def collectives(text: str) -> tuple[Collective, ...]:
    """Return the collective operations of a step by kind; `text` is what `compiled.as_text()` returns."""
    computations, entry = _parse(text)
    counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    uncounted: dict[str, int] = defaultdict(int)
    chains: set[tuple[str, str]] = set()
    for name, often, known in _visits(computations, entry):
        for kind, size, chain in computations[name].found:
            if chain in chains:
                continue
            if chain is not None:
                chains.add(chain)
            counts[kind].append((often, size))
            uncounted[kind] += not known
    return tuple(
        Collective(
            kind,
            count=sum(often for often, _ in counts[kind]),
            bytes=sum(often * size for often, size in counts[kind]),
            largest=max(size for _, size in counts[kind]),
            uncounted=uncounted[kind],
        )
        for kind in sorted(counts)
    )


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """Return the computations of a program by name, and the name of the one that it begins with."""
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation("")
    for line in text.splitlines():
        if not line.startswith(" "):
            if head := _COMPUTATION.match(line):
                current = computations.setdefault(head["name"], _Computation(head["name"]))
                entry = head["name"] if head["entry"] else entry
            continue
        if found := _COLLECTIVE.search(line):
            chain = _CHAIN.search(line)
            key = None if chain is None else (chain[1], chain[2])
            current.found.append((_kind(found["kind"], current.name), _size(line, found), key))
        if bound := _BOUND.search(line):
            current.bounds.append(int(bound[1]))
        if loop := _LOOP.search(line):
            trips = _TRIPS.search(line)
            bounds = computations[loop["condition"]].bounds if loop["condition"] in computations else []
            # A loop of JAX counts from zero up to the one number in its condition.
            often = int(trips[1]) if trips else bounds[0] if len(bounds) == 1 else None
            current.calls.append((loop["body"], often or 1, often is not None))
        elif not _CONTINUED.search(line):
            names = [*_CALLED.findall(line), *(_names(found[1]) if (found := _BRANCHES.search(line)) else ())]
            current.calls += [(name, 1, True) for name in names]
    return computations, entry


def _names(text: str) -> list[str]:
    return [name.strip().lstrip("%") for name in text.split(",")]


def _visits(computations: dict[str, _Computation], entry: str) -> Iterator[tuple[str, int, bool]]:
    """Yield each computation that is called, for each call: its name, how often, and whether that is known."""
    waiting = [(entry, 1, True)]
    while waiting:
        name, often, known = waiting.pop()
        if name in computations:
            yield name, often, known
            waiting += [(callee, often * times, known and sure) for callee, times, sure in computations[name].calls]


def _kind(kind: str, computation: str) -> str:
    if kind == "all-reduce" and computation.startswith(_SCATTERED):
        return "reduce-scatter"
    return kind.removeprefix("ragged-")


def _size(line: str, found: re.Match[str]) -> int:
    """Return the bytes of the whole arrays of a collective operation."""
    sizes = [_bytes(kind, dims) for kind, dims in _ARRAY.findall(found["shape"])]
    if found["start"] and found["kind"] == "all-gather":
        sizes = sizes[len(sizes) // 2 :]  # the inputs stand before the outputs
    elif found["start"] and found["kind"] == "collective-permute":
        sizes = sizes[1:2]  # the input, the output, and two numbers
    whole = sum(sizes)
    return whole * _group(line) if found["kind"] == "reduce-scatter" else whole


def _bytes(kind: str, dims: str) -> int:
    bits = 8 if kind == "pred" or kind.startswith("f8") else int(re.sub(r"\D", "", kind))
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _group(line: str) -> int:
    """Return how many devices take part, of which each keeps its part of what is reduced."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(shaped[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        sizes = dict(part.split("=") for part in named[1].replace("'", "").split(","))
        return math.prod(int(sizes[axis]) for axis in named[2].replace("'", "").split(","))
    return 1
