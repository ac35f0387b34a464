"""A run under way: dispatching steps, and what is due between them."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from distaff.core.errors import DataError, DistaffError
from distaff.core.mesh import on
from distaff.core.processes import Appointment
from distaff.core.tree import Tree
from distaff.train.best import Best
from distaff.train.checkpoint import Checkpoints
from distaff.train.config import LoopConfig
from distaff.train.evaluate import evaluate
from distaff.train.log import Sink, Terminal
from distaff.train.measure import Stopwatch, peak_memory_mb
from distaff.train.metrics import NO_STEP, StepMetrics, add_steps, divide
from distaff.train.prefetch import Batches, Drawn, Prefetch
from distaff.train.resume import positions_to_json, window_to_json
from distaff.train.signals import StopRequest
from distaff.train.state import TrainState
from distaff.train.step import LossFunction, TrainStep, debugging_nans, place_rows

logger = logging.getLogger("distaff.train")

Values = dict[str, float]
# `(params) -> values`, or `(params, carried)` where the state carries something.
Score = Callable[..., Values]
TokenCount = int | str | Callable[[Any], int]


@dataclass(frozen=True)
class Hooks:
    """The caller's functions, as `fit` describes them."""

    loss_fn: LossFunction
    eval_batches: Batches | None
    tokens_per_batch: TokenCount | None
    derived: Callable[[Values], Values] | None
    score: Score | None
    on_log: Callable[[int, Values], None] | None


@dataclass(kw_only=True)
class Run:
    """A run under way.

    state, step: after the latest dispatched step. window: sums since the last log; None right after one.
    position: of the batches after the latest step. saved_step: what the newest checkpoint holds.
    identity: what the batches are a function of besides the step, if they say it.
    best: the best evaluation so far, where evaluations are compared.
    appointment: of several processes, to stop after the same step.
    in_flight: metrics of the steps the devices may still work on. watch: seconds of training since the last log.
    steps, rows, tokens: trained since then, in this process's life.
    """

    config: LoopConfig
    hooks: Hooks
    train_step: TrainStep
    mesh: Mesh
    checkpoints: Checkpoints | None
    stop: StopRequest
    compilations: dict[str, int]
    state: TrainState
    step: int
    window: StepMetrics | None
    position: dict[str, Any] | None
    identity: dict[str, Any] | None
    best: Best | None = None
    appointment: Appointment | None = None
    terminal: Terminal | None = None
    sinks: list[Sink] = field(default_factory=list)
    metrics: Values = field(default_factory=dict)
    saved_step: int | None = None
    in_flight: deque[StepMetrics] = field(default_factory=deque)
    watch: Stopwatch = field(default_factory=Stopwatch)
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    compilations_told: int = 1

    def train(self, batches: Batches) -> None:
        """Run to the end, or until someone asks to stop."""
        config, first = self.config, self.step
        if self._patience_ended():
            self._agree_on_signal()
            return
        prefetch = Prefetch(
            batches,
            start=self.step,
            stop=config.total_steps,
            place=lambda batch: place_rows(batch, self.mesh, accumulation=config.accumulation),
            measure=partial(self._size, getattr(batches, "examples", None)),
            # Of several processes none may leave alone: they agree after a step.
            waiting=lambda: bool(self.stop) and self.appointment is None,
        )
        with prefetch:
            try:
                for drawn in prefetch:
                    self._advance(drawn)
                    if self.step == first + 1:
                        # The first call traced and compiled; that is not the time of a step.
                        seconds = self.watch.restart()
                        self._say(f"first step ready after {seconds:.1f} s")
                    self._attend()
                    if self._patience_ended() or self._stopping():
                        break
            except Exception as error:
                # Processes save together, and the others know nothing of this one's data.
                if (error is prefetch.error or isinstance(error, DataError)) and jax.process_count() == 1:
                    self._save_last(first)
                    if self.saved_step is not None:
                        logger.warning(
                            "The data failed. Step %d is saved: put the data right, then resume.", self.saved_step
                        )
                raise
        self._agree_on_signal()
        self._save_last(first)
        counts = ", ".join(f"{name} {count}" for name, count in self.compilations.items())
        self._say(f"{'stopped' if self.stop else 'done'} at step {self.step}; compilations: {counts}")

    def close(self) -> None:
        """Write out the logs."""
        for sink in self.sinks:
            sink.close()
        if self.terminal is not None:
            self.terminal.close()

    def _save_last(self, first: int) -> None:
        """Save the latest step of a run that began after step `first`, and wait until it is on disk."""
        if self.checkpoints is not None:
            if self.saved_step != self.step and self.step > first:
                self._save()
            self.checkpoints.wait()

    def _advance(self, drawn: Drawn) -> None:
        """Dispatch one step."""
        debugging = debugging_nans(f"step {self.step + 1}") if self.config.debug_nans else contextlib.nullcontext()
        with debugging, on(self.mesh):
            self.state, metrics = self.train_step(self.state, drawn.batch)
        self.window = metrics if self.window is None else add_steps(self.window, metrics)
        self.step, self.position = drawn.step + 1, drawn.position
        rows, tokens = drawn.size
        self.steps, self.rows, self.tokens = self.steps + 1, self.rows + rows, self.tokens + tokens
        # One step works, one waits: enough to keep the devices busy, and a wish to stop is heard within two steps.
        self.in_flight.append(metrics)
        if len(self.in_flight) > 1:
            jax.block_until_ready(self.in_flight.popleft())
        if self.terminal is not None:
            self.terminal.advance(self.step)

    def _attend(self) -> None:
        """Do what is due after a step: log, evaluate, save."""
        config, last = self.config, self.step == self.config.total_steps
        if last or self.step % config.log_every == 0:
            self._log()
        evaluates = self.hooks.eval_batches is not None or self.hooks.score is not None
        if evaluates and (last or (config.eval_every and self.step % config.eval_every == 0)):
            self._evaluate()
        due = config.save_every and self.step % config.save_every == 0
        if self.checkpoints is not None and due and self.saved_step != self.step:
            self._save()

    def _log(self) -> None:
        window = self._read_window()
        assert window is not None
        seconds = self.watch.restart()
        values = self._values(divide(window.sums))
        if window.learning_rate is not None:
            values["learning_rate"] = float(window.learning_rate)
        processes = jax.process_count()
        if self.hooks.tokens_per_batch is not None:
            values["tokens_per_second"] = self.tokens * processes / seconds
        values["examples_per_second"] = self.rows * processes / seconds
        values["step_seconds"] = seconds / self.steps
        values["peak_memory_mb"] = peak_memory_mb()
        self.window, self.steps, self.rows, self.tokens = None, 0, 0, 0
        self._write(values)
        if self.checkpoints is not None:
            self.checkpoints.check()
        if self.compilations["train_step"] > self.compilations_told:
            self.compilations_told = self.compilations["train_step"]
            logger.warning(
                "The train step was compiled %d times: each shape of the batches costs a compilation.",
                self.compilations_told,
            )

    def _evaluate(self) -> None:
        jax.block_until_ready(self.state.step)
        with self.watch.paused():
            values, params = {}, self.state.evaluated
            if self.hooks.eval_batches is not None:
                values = evaluate(
                    self.hooks.loss_fn,
                    params=params,
                    carried=self.state.carried,
                    batches=self.hooks.eval_batches,
                    steps=self.config.eval_steps,
                    mesh=self.mesh,
                )
                if not values:
                    logger.warning(
                        "The evaluation at step %d has nothing to score: all its weights are zero.", self.step
                    )
                values = self._values(values)
            if self.hooks.score is not None:
                carried = () if self.state.carried is None else (self.state.carried,)
                values |= self.hooks.score(params, *carried)
            values = {f"eval_{name}": value for name, value in values.items()}
            self._write(values)
        if self.best is not None and self.best.consider(self.step, values) and self.best.selection.reload:
            assert self.checkpoints is not None
            self.checkpoints.kept = self.step
            self._save()

    def _patience_ended(self) -> bool:
        if self.best is None or not self.best.exhausted:
            return False
        self._say(f"no better {self.best.selection.metric} in {self.best.waited} evaluations")
        return True

    def _save(self) -> None:
        """Save, unless a parameter is not finite: such a checkpoint would only hide the newest good one."""
        assert self.checkpoints is not None
        jax.block_until_ready(self.state.step)
        with self.watch.paused():
            window = self._read_window()
            if not bool(jax.device_get(all_finite((self.state.params, self.state.average, self.state.carried)))):
                raise DistaffError(f"The parameters are not finite after step {self.step}: lower the learning rate.")
            meta = {
                "step": self.step,
                "seed": self.config.seed,
                "total_steps": self.config.total_steps,
                "accumulation": self.config.accumulation,
                "positions": positions_to_json(self.position),
                "window": window_to_json(window),
                "data": self.identity,
                "best": None if self.best is None else self.best.to_json(),
                "mesh": dict(self.mesh.shape),
                "versions": {module.__name__: module.__version__ for module in (jax, optax, np)},
            }
            self.checkpoints.save(self.step, self.state, meta)
            self.saved_step = self.step

    def _read_window(self) -> StepMetrics | None:
        """Bring the sums since the last log to the host; DistaffError if a step's loss was not finite."""
        if self.window is None:
            return None
        window = jax.device_get(self.window)
        if window.bad_step != NO_STEP:
            raise DistaffError(
                f"The loss or its gradient is not finite at step {int(window.bad_step)}: lower the learning rate, or "
                "find the operation with debug_nans."
            )
        return window

    def _write(self, values: Values) -> None:
        """Give the values of this step to every sink, with the epoch."""
        epoch = self._epoch()
        values = ({} if epoch is None else {"epoch": epoch}) | values
        self.metrics |= values
        for sink in self.sinks:
            sink.write(self.step, values)
        if self.terminal is not None:
            self.terminal.write(self.step, values)
        if self.hooks.on_log is not None:
            self.hooks.on_log(self.step, values)

    def _values(self, divided: Values) -> Values:
        """Return divided sums, the loss first, and what the caller derives from them."""
        values = {name: divided[name] for name in sorted(divided, key=lambda name: (name != "loss", name))}
        return values if self.hooks.derived is None else values | self.hooks.derived(dict(values))

    def _epoch(self) -> float | None:
        """Return how often the data was seen, by the caller's count or else by the stream's own."""
        if self.config.steps_per_epoch is not None:
            return self.step / self.config.steps_per_epoch
        return None if self.position is None else self.position.get("epoch")

    def _size(self, examples: Callable[[Any], int] | None, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Return the examples, of which each row is one unless `examples` counts them, and tokens of a host batch."""
        rows = len(jax.tree.leaves(batch)[0]) if examples is None else examples(batch)
        count = self.hooks.tokens_per_batch
        if isinstance(count, str):
            return rows, int(np.sum(batch[count]))
        return rows, int(count(batch) if callable(count) else count or 0)

    def _stopping(self) -> bool:
        """Tell whether to stop after this step."""
        if self.appointment is None:
            return bool(self.stop)
        return self.appointment.reached(self.step, asked=bool(self.stop))

    def _agree_on_signal(self) -> None:
        """Leave, of several processes, for the number of the signal that reached one of them."""
        if self.appointment is not None:
            numbers = multihost_utils.process_allgather(np.int32(self.stop.number or 0))
            self.stop.number = int(np.max(numbers)) or None

    def _say(self, text: str) -> None:
        if self.terminal is not None:
            self.terminal.say(text)


@jax.jit
def all_finite(tree: Tree) -> jax.Array:
    """Tell whether every number of every floating array is finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))
