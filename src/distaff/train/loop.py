"""The training loop: step, log, evaluate, save, resume, leave cleanly. It sees functions and pytrees only.

In order: 1. the folder is checked and the checkpoint to resume from found; 2. the state is made or restored; 3. batches
are made ahead by a thread; 4. each step is dispatched, its sums stay on the devices until the next log; 5. at their
steps: log, evaluate, save, in this order, so that a checkpoint never knows more than the log; 6. the last step and an
interrupted one are saved.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from distaff.core.errors import CheckpointError, UsageError
from distaff.core.mesh import checked_mesh, make_mesh
from distaff.core.processes import Appointment, agreed
from distaff.core.tree import Tree
from distaff.train.best import Best
from distaff.train.checkpoint import Checkpoints, complete_steps, read_trained, restore
from distaff.train.config import LoopConfig
from distaff.train.exhausted import memory_errors
from distaff.train.log import Terminal, check_reporters, make_sinks
from distaff.train.measure import Compilations
from distaff.train.metrics import StepMetrics
from distaff.train.prefetch import Batches, position_of
from distaff.train.resume import (
    CHECKPOINTS,
    find_checkpoint,
    goes_on_in,
    identity_of,
    leave_behind,
    prepare_output,
    remove_earlier_run,
    restore_position,
    warn_of_other_data,
    window_from_json,
)
from distaff.train.run import Hooks, Run, Score, TokenCount, Values
from distaff.train.signals import stop_requests
from distaff.train.state import TrainState, abstract_state, create_state
from distaff.train.step import LossFunction, Schedule, TrainStep, make_train_step

logger = logging.getLogger("distaff.train")


@dataclass(frozen=True)
class FitResult:
    """What a run leaves.

    state: after the last step. step: how many steps are done in all, those before a resume too.
    metrics: of the last log and, as `eval_...`, of the last evaluation.
    interrupted: the number of the signal that ended the run early, else None.
    compilations: how often `train_step` and `eval_step` were compiled.
    best: the best evaluation, where evaluations are compared; with `reload` the state holds its parameters.
    params: to evaluate and to save: the state's, or their average where the run kept one.
    """

    state: TrainState
    step: int
    metrics: Values
    interrupted: int | None
    compilations: dict[str, int]
    best: Best | None = None

    @property
    def params(self) -> Tree:
        """See above."""
        return self.state.evaluated


def fit(
    loss_fn: LossFunction,
    *,
    params: Tree | Callable[[], Tree],
    tx: optax.GradientTransformation,
    batches: Batches,
    config: LoopConfig,
    mesh: Mesh | None = None,
    param_shardings: Tree | None = None,
    filled: Mapping[str, tuple[int, ...]] | None = None,
    carried: Tree = None,
    schedule: Schedule | None = None,
    eval_batches: Batches | None = None,
    tokens_per_batch: TokenCount | None = None,
    derived: Callable[[Values], Values] | None = None,
    score: Score | None = None,
    on_log: Callable[[int, Values], None] | None = None,
    on_start: Callable[[], None] | None = None,
) -> FitResult:
    """Train `params` and return the result; see `LoopConfig` for the settings.

    loss_fn: `(params, batch, rng) -> {"loss": (sum, weight), ...}`; rng is None in evaluation.
    params: the tree, or a function that returns it and keeps nothing, so that there are no two copies of it.
    filled: shapes of padded parameters without their padding, by '/'-path: checkpoints may be padded otherwise.
    carried: what it hands on besides (running statistics), before the first step; then the function is
    `(params, batch, rng, carried) -> (sums, carried)`, and the result's `state.carried` holds the last.
    batches: `step -> {name: array}`, this process's `accumulation * rows` of a step's batch (see `prefetch`).
    schedule: the learning rate by steps done, for the log. eval_batches: `index -> batch` for `config.eval_steps`.
    tokens_per_batch: of this process; a number, the batch key whose sum it is, or a function of the host batch.
    derived: more values from a log's values ("loss" -> "perplexity"). score: more values of an evaluation, or without
    eval_batches all of them, from the parameters and from what is carried beside them, if anything is.
    on_log: called with each log and evaluation.
    on_start: called once, when nothing can be refused any more.

    Raises UsageError for settings that cannot be, CheckpointError, and DistaffError for a loss that is not finite.
    """
    _check(config, eval_batches, score)
    mesh = make_mesh() if mesh is None else checked_mesh(mesh)
    output = None if config.output_dir is None else Path(config.output_dir)
    source = _find_source(config, output)
    begun: dict[str, Any] = {"seed": config.seed, "averaged": config.ema_decay is not None}
    with memory_errors("the state of a training"):
        given = params() if callable(params) else params
        state = create_state(given, tx, mesh=mesh, shardings=param_shardings, carried=carried, **begun)
        del given  # the run has its own copy
    state, meta = _restored(state, source, config=config, batches=batches, filled=filled)
    if output is not None:
        _clear_way(config, output, source, step=int(jax.device_get(state.step)))
    best = _best_before(config, meta, output, source)
    hooks = Hooks(loss_fn, eval_batches, tokens_per_batch, derived, score, on_log)
    settings: dict[str, Any] = {"accumulation": config.accumulation, "ema_decay": config.ema_decay}
    keep = config.debug_nans
    train_step = make_train_step(loss_fn, tx, state=state, schedule=schedule, donate=not keep, **settings)
    window = window_from_json(meta.get("window"), mesh)
    if on_start is not None:
        on_start()
    result = _drive(
        hooks, config=config, mesh=mesh, train_step=train_step, state=state, window=window, batches=batches, best=best
    )
    return result if output is None else _reloaded(result, output, source, filled)


def _check(config: LoopConfig, eval_batches: Batches | None, score: Score | None) -> None:
    """Raise `UsageError` for settings that do not fit together."""
    if eval_batches is not None and config.eval_steps < 1:
        raise UsageError("eval_batches need eval_steps of at least 1 in the config.")
    if config.selection is not None and eval_batches is None and score is None:
        raise UsageError("There is no evaluation to choose by: give eval_batches or score, or no selection.")
    check_reporters(config.report_to)


def _best_before(
    config: LoopConfig, meta: dict[str, Any], output: Path | None, source: tuple[Path, int | None] | None
) -> Best | None:
    """Return the best evaluation before the checkpoint that `meta` is of, None where none is chosen."""
    if config.selection is None:
        return None
    best = Best(config.selection)
    best.take(meta.get("best"))
    if best.step is not None and best.selection.reload and _kept(best.step, output, source) is None:
        # It was chosen by a run that did not reload it, or given up later for a better one.
        gone = "The checkpoint of step %d, the best before, is gone: the best from here on is taken."
        logger.warning(gone, best.step)
        best.step, best.metrics = None, {}
    return best


@memory_errors("a training step or an evaluation")
def _drive(
    hooks: Hooks,
    *,
    config: LoopConfig,
    mesh: Mesh,
    train_step: TrainStep,
    state: TrainState,
    window: StepMetrics | None,
    batches: Batches,
    best: Best | None,
) -> FitResult:
    """Run from `state` to the end with signals caught, compilations counted, logs and checkpoints open."""
    start = int(jax.device_get(state.step))
    # Leaving takes these in reverse: logs closed, the last save waited for, handlers put back.
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_requests())
        compilations = stack.enter_context(Compilations("train_step", "eval_step"))
        checkpoints = None
        if config.output_dir is not None:
            folder = Path(config.output_dir) / CHECKPOINTS
            checkpoints = stack.enter_context(Checkpoints(folder, keep=config.save_total_limit))
            checkpoints.kept = None if best is None else best.step
        run = Run(
            config=config,
            hooks=hooks,
            train_step=train_step,
            mesh=mesh,
            checkpoints=checkpoints,
            stop=stop,
            compilations=compilations.counts,
            state=state,
            step=start,
            window=window,
            position=position_of(batches),
            identity=identity_of(batches),
            best=best,
            appointment=Appointment() if jax.process_count() > 1 else None,
        )
        stack.callback(run.close)
        if jax.process_index() == 0:
            run.terminal = Terminal(total=config.total_steps, start=start) if config.progress else None
            run.sinks = make_sinks(config, start=start)
        run.train(batches)
    return FitResult(run.state, run.step, run.metrics, stop.number, dict(compilations.counts), best)


def _reloaded(
    result: FitResult,
    output: Path,
    source: tuple[Path, int | None] | None,
    filled: Mapping[str, tuple[int, ...]] | None,
) -> FitResult:
    """Return `result` with the parameters of the best step, where they are asked for."""
    best = result.best
    if best is None or best.step is None or not best.selection.reload or result.interrupted:
        return result
    folder = _kept(best.step, output, source)
    if folder is None:
        raise CheckpointError(f"{output} lacks the checkpoint of step {best.step}, the best one: train anew.")
    return replace(result, state=read_trained(folder, result.state, filled=filled))


def _kept(step: int, output: Path | None, source: tuple[Path, int | None] | None) -> Path | None:
    """Return the checkpoint of `step`, of this run or of the one that it goes on from; None if there is none."""
    folders = [*([] if output is None else [output / CHECKPOINTS]), *([] if source is None else [source[0]])]
    return next((folder / str(step) for folder in folders if step in complete_steps(folder)), None)


def _find_source(config: LoopConfig, output: Path | None) -> tuple[Path, int | None] | None:
    """Return the checkpoint to go on from, after making sure that the output folder may be used."""

    def find() -> tuple[str, int | None] | None:
        source = None if config.resume is None else find_checkpoint(config.resume, output)
        if output is not None:
            # Beside its own steps those of another run would be taken for its, the best one among them.
            resume = source is not None and goes_on_in(output, config.resume)
            prepare_output(output, resume=resume, overwrite=config.overwrite)
        return None if source is None else (str(source[0]), source[1])

    found = agreed(find)
    return None if found is None else (Path(found[0]), found[1])


def _clear_way(config: LoopConfig, output: Path, source: tuple[Path, int | None] | None, *, step: int) -> None:
    """Remove the run that is overwritten, now that nothing was refused, or move what is later than `step` aside."""
    if config.overwrite and (source is None or not goes_on_in(output, config.resume)):
        agreed(partial(remove_earlier_run, output))
    if source is not None:
        leave_behind(output, step)


def _restored(
    state: TrainState,
    source: tuple[Path, int | None] | None,
    *,
    config: LoopConfig,
    batches: Batches,
    filled: Mapping[str, tuple[int, ...]] | None,
) -> tuple[TrainState, dict[str, Any]]:
    """Return the state and meta of the checkpoint `source`, with the batches sent to its position."""
    if source is None:
        return state, {}
    state, meta = restore(source[0], abstract_state(state), step=source[1], filled=filled)
    restore_position(batches, meta.get("positions"))
    warn_of_other_data(meta.get("data"), identity_of(batches))
    if meta.get("seed", config.seed) != config.seed:
        logger.warning("The run goes on with the random key of seed %d, not %d.", meta["seed"], config.seed)
    return state, meta
