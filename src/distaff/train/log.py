"""Where the numbers of a run go: terminal, TensorBoard, `metrics.jsonl`, and wandb when asked.

Each place is a `Sink`; only process 0 writes.
"""

import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from distaff.core.errors import MissingExtraError, UsageError
from distaff.train.config import LoopConfig

Values = Mapping[str, float]

# Where `report_to` names lead, and the extra of the package that each needs.
REPORTERS = {"tensorboard": ("tensorboardX", "tensorboard"), "wandb": ("wandb", "wandb")}


class Sink(Protocol):
    """One place that takes the values of a step."""

    def write(self, step: int, values: Values) -> None:
        """Take the values measured at `step` (steps done so far)."""

    def close(self) -> None:
        """Write out what is pending."""


class JsonLines:
    """`metrics.jsonl`: one object a log, with `step` first. Lines after step `start` (of a run left behind) go."""

    def __init__(self, path: Path, *, start: int):
        _keep_lines(path, until=start)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values) -> None:
        """Take the values measured at `step`."""
        # JSON has no infinity and no NaN.
        line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write out what is pending."""
        self._file.close()


class TensorBoard:
    """Event files that TensorBoard reads, under `runs/`, without TensorFlow."""

    def __init__(self, folder: Path, *, start: int):
        from tensorboardX import SummaryWriter

        # What the interrupted run wrote after the step that is resumed is hidden by TensorBoard.
        self._writer = SummaryWriter(logdir=str(folder), purge_step=start + 1 if start else None)

    def write(self, step: int, values: Values) -> None:
        """Take the values measured at `step`."""
        for name, value in values.items():
            side, short = ("eval", name.removeprefix("eval_")) if name.startswith("eval_") else ("train", name)
            self._writer.add_scalar(f"{side}/{short}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write out what is pending."""
        self._writer.close()


class Wandb:
    """A run on Weights & Biases; name, project and mode come from its own environment variables."""

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(dir=None if folder is None else str(folder), config=dict(settings))

    def write(self, step: int, values: Values) -> None:
        """Take the values measured at `step`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write out what is pending."""
        self._run.finish()


class Terminal:
    """A bar with the time left on a terminal, plain lines elsewhere."""

    def __init__(self, *, total: int, start: int, stream: TextIO | None = None):
        from tqdm import tqdm

        self._stream = sys.stderr if stream is None else stream
        self._total = total
        # When the first step came back: what it took to compile says nothing about the time left.
        self._first: tuple[int, float] | None = None
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total, initial=start, desc="train", unit="step", file=self._stream)

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        self._first = (step, time.perf_counter()) if self._first is None else self._first
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def write(self, step: int, values: Values) -> None:
        """Take the values measured at `step`."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        self.say(f"step {step}/{self._total}  {text}{self._left(step)}")

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Write out what is pending."""
        if self._bar is not None:
            self._bar.close()

    def _left(self, step: int) -> str:
        if self._bar is not None or self._first is None or not self._first[0] < step < self._total:
            return ""
        seconds = (time.perf_counter() - self._first[1]) / (step - self._first[0]) * (self._total - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"  left {hours}:{minutes:02}:{seconds:02}"


def check_reporters(names: Sequence[str]) -> None:
    """Raise UsageError for an unknown name and MissingExtraError for a package that is not installed."""
    for name in names:
        if name not in REPORTERS:
            raise UsageError(f"report_to '{name}' is not known: choose from {', '.join(REPORTERS)}.")
        module, extra = REPORTERS[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingExtraError(module, extra, f"report_to '{name}'") from error


def installed_reporters() -> tuple[str, ...]:
    """Return the names of all places to report to whose packages are installed."""
    return tuple(name for name, (module, _) in REPORTERS.items() if importlib.util.find_spec(module) is not None)


def make_sinks(config: LoopConfig, *, start: int) -> list[Sink]:
    """Return the sinks besides the terminal for a run that begins after step `start`; files need an output_dir."""
    sinks: list[Sink] = []
    folder = None if config.output_dir is None else Path(config.output_dir)
    if folder is not None:
        sinks.append(JsonLines(folder / "metrics.jsonl", start=start))
        if "tensorboard" in config.report_to:
            sinks.append(TensorBoard(folder / "runs", start=start))
    if "wandb" in config.report_to:
        sinks.append(Wandb(folder, {name: str(value) for name, value in vars(config).items()}))
    return sinks


def _keep_lines(path: Path, *, until: int) -> None:
    """Rewrite the file at `path` with the whole lines up to step `until`."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            keep = json.loads(line)["step"] <= until
        except (ValueError, KeyError, TypeError):
            # The process was killed in the middle of this line.
            continue
        if keep:
            kept.append(line + b"\n")
    fresh = path.with_suffix(".tmp")
    fresh.write_bytes(b"".join(kept))
    os.replace(fresh, path)


def _short(value: float) -> str:
    """Return a number in few characters: 12345.6 -> 12,346, 0.00012 -> 1.2e-04."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.4g}"
