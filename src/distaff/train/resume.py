"""Where a run goes on: which checkpoint, what is left behind, and what travels in a checkpoint besides the arrays."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from distaff.core.errors import CheckpointError, UsageError, listed
from distaff.core.mesh import replicated
from distaff.core.processes import agreed
from distaff.train.checkpoint import complete_steps
from distaff.train.metrics import NO_STEP, StepMetrics
from distaff.train.prefetch import Batches, Identified, Positioned

logger = logging.getLogger("distaff.train")

CHECKPOINTS = "checkpoints"
LEFT_BEHIND = "checkpoints-left-behind"
# `resume`: the newest checkpoint, where there is one. A scheduler can start one command again and again with it.
IF_ANY = "if_any"


def find_checkpoint(resume: str | Path, output_dir: Path | None) -> tuple[Path, int | None] | None:
    """Return the folder of checkpoints that `resume` means, and the step (None: the newest that can be read).

    resume: "newest" (of `output_dir`), an output folder, a folder of checkpoints, or one checkpoint in it; "if_any" is
    "newest", and None is returned where there is none.
    """
    if resume == IF_ANY and output_dir is not None and not complete_steps(output_dir / CHECKPOINTS):
        return None
    if resume in ("newest", IF_ANY):
        if output_dir is None:
            raise UsageError(f"resume='{resume}' needs an output_dir in which to look for checkpoints.")
        if not complete_steps(output_dir / CHECKPOINTS):
            raise UsageError(f"{output_dir} holds no complete checkpoint to resume from: start without resuming.")
        return output_dir / CHECKPOINTS, None
    path = Path(resume)
    if path.name.isdigit() and int(path.name) in complete_steps(path.parent):
        return path.parent, int(path.name)
    for folder in (path / CHECKPOINTS, path):
        if complete_steps(folder):
            return folder, None
    raise UsageError(
        f"{path} neither is nor holds a complete checkpoint to resume from: name the folder of a run, or one of its "
        f"{CHECKPOINTS}."
    )


def goes_on_in(output_dir: Path, resume: str | Path | None) -> bool:
    """Tell whether `resume` means checkpoints in `output_dir` itself, and not those of a run in another folder."""
    if resume in (None, "newest", IF_ANY):
        return resume is not None
    return Path(str(resume)).resolve().is_relative_to(output_dir.resolve())


def prepare_output(output_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Make `output_dir`. An earlier run in it is refused unless it is resumed, or to be overwritten."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir {output_dir} cannot be written: {error.strerror}.") from error
    steps = complete_steps(output_dir / CHECKPOINTS)
    if steps and not (resume or overwrite):
        raise UsageError(
            f"{output_dir} already holds checkpoints up to step {steps[-1]}: resume from them, overwrite them, or "
            "choose another output_dir."
        )


def remove_earlier_run(output_dir: Path) -> None:
    """Remove checkpoints and logs of an earlier run."""
    for name in (CHECKPOINTS, LEFT_BEHIND, "runs"):
        shutil.rmtree(output_dir / name, ignore_errors=True)
    (output_dir / "metrics.jsonl").unlink(missing_ok=True)


def leave_behind(output_dir: Path, step: int) -> None:
    """Move checkpoints of steps after `step` aside: they are of another run now, or damaged."""
    aside = output_dir / LEFT_BEHIND

    def move() -> list[int]:
        later = [found for found in complete_steps(output_dir / CHECKPOINTS) if found > step]
        for found in later:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(found), ignore_errors=True)
            (output_dir / CHECKPOINTS / str(found)).rename(aside / str(found))
        return later

    if later := agreed(move):
        logger.warning(
            "The run goes on from step %d: checkpoints of later steps (%s) are now in %s.", step, listed(later), aside
        )


def window_to_json(window: StepMetrics | None) -> dict[str, Any] | None:
    """Return the sums since the last log as JSON, exact in float32."""
    if window is None:
        return None
    sums = {name: [float(total), float(weight)] for name, (total, weight) in window.sums.items()}
    return {"sums": sums, "learning_rate": None if window.learning_rate is None else float(window.learning_rate)}


def window_from_json(saved: dict[str, Any] | None, mesh: Mesh) -> StepMetrics | None:
    """Return what `window_to_json` saved, on the devices."""
    if saved is None:
        return None
    # Host numbers first: device_put makes arrays of them without an implicit transfer.
    host: dict[str, Any] = {
        "sums": {name: tuple(np.float32(number) for number in pair) for name, pair in saved["sums"].items()},
        "learning_rate": None if saved["learning_rate"] is None else np.float32(saved["learning_rate"]),
        "bad_step": np.int32(NO_STEP),
    }
    return StepMetrics(**jax.device_put(host, replicated(mesh)))


def positions_to_json(position: dict[str, Any] | None) -> list[Any] | None:
    """Return the position of each process's source of batches; every process must call this."""
    if position is None or jax.process_count() == 1:
        return None if position is None else [position]
    text = np.frombuffer(json.dumps(position).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(text)))))
    padded = np.pad(text, (0, longest - len(text)), constant_values=ord(" "))
    return [json.loads(row.tobytes()) for row in np.asarray(multihost_utils.process_allgather(padded))]


def restore_position(batches: Batches, saved: list[Any] | None) -> None:
    """Send a positioned source of batches to where the checkpoint says."""
    if not isinstance(batches, Positioned):
        if saved is not None:
            raise CheckpointError("The checkpoint holds the position of a stream, and these batches take none.")
        return
    if saved is None:
        raise CheckpointError("The checkpoint holds no position for these batches: it was made without a stream.")
    if len(saved) != jax.process_count():
        raise CheckpointError(
            f"The checkpoint holds stream positions of {len(saved)} processes and cannot go on with "
            f"{jax.process_count()}."
        )
    batches.load_state_dict(saved[jax.process_index()])


def identity_of(batches: Batches) -> dict[str, Any] | None:
    """Return what the batches are a function of, None for a source that does not say it."""
    return batches.identity() if isinstance(batches, Identified) else None


def warn_of_other_data(saved: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Say in what the data differs from that of the run that is gone on with, where both are known."""
    if saved is None or now is None:
        return
    now = json.loads(json.dumps(now))
    changed = [
        f"{name} was {saved[name]} and is {now[name]}" for name in now if name in saved and saved[name] != now[name]
    ]
    if changed:
        logger.warning(
            "The run goes on with other data than it was begun with, so rows may come twice or never: %s.",
            "; ".join(changed),
        )
