"""Checkpoints of a run: Orbax, asynchronous, the newest complete one, and never half of one.

On disk: `<directory>/<step>/` with the items `params`, `opt_state`, `loop` (step and key of the run), `carried` and
`average` (where there are such) and `meta` (JSON).
A checkpoint gets its name by one rename after everything is written, so a folder with that name is complete.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from distaff.core.errors import CheckpointError, DistaffError, UsageError, listed
from distaff.core.processes import everywhere
from distaff.core.tree import Tree, path_of
from distaff.train.relayout import as_stored, as_wanted, cut_off
from distaff.train.state import TrainState, abstract_state

logger = logging.getLogger("distaff.train")

# Seconds between the first process that has read a checkpoint, or has failed to, and the last.
_MOST_APART = 300.0
# Orbax writes this file last before it renames the folder of a step.
_MARK = "_CHECKPOINT_METADATA"
# Behind what happened, TensorStore says how it was set up.
_DETAILS = re.compile(r" \[tensorstore_spec| See full TensorStore details")
# What a state may have besides parameters and optimizer, each an item of its own.
BESIDES = ("carried", "average")


class Checkpoints:
    """The checkpoints in one folder. Use it in a `with` block: leaving waits for what is still being written.

    keep: how many of the newest stay (all when None). kept: a step that stays besides them, None for none.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = None):
        if keep is not None and keep < 1:
            raise UsageError(f"save_total_limit must be at least 1, not {keep}.")
        self.directory = Path(directory).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"Checkpoints cannot be written to {self.directory}: {error.strerror}.") from error
        self.kept: int | None = None
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_Preserved(self, keep),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except DistaffError as failed:
            if error is None:
                raise
            # What ended the run first is what the user must see.
            logger.warning("%s", failed)
        finally:
            self._manager.close()

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, oldest first."""
        return complete_steps(self.directory)

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Begin to write `state` and the JSON-able `meta`; the arrays may be donated as soon as this returns.

        Raises CheckpointError if this save or the one before it, still under way until now, failed.
        """
        items = ocp.args.Composite(
            **{name: ocp.args.StandardSave(item) for name, item in _items(state).items()},
            meta=ocp.args.JsonSave(meta),
        )
        with self._failures():
            self._manager.wait_until_finished()
            if step in self._manager.all_steps():
                # Orbax refuses a step that is there already. What the run has now is what must stand there.
                self._manager.delete(step)
            if not self._manager.save(step, args=items, force=True):
                raise CheckpointError(f"The checkpoint of step {step} was not written to {self.directory}.")

    def check(self) -> None:
        """Raise CheckpointError if a save in the background has failed."""
        with self._failures():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until the last save is on disk; raise CheckpointError if it failed."""
        with self._failures():
            self._manager.wait_until_finished()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except DistaffError:
            raise
        except Exception as error:
            raise CheckpointError(f"A checkpoint could not be written to {self.directory}: {_reason(error)}") from error


@dataclass(frozen=True)
class _Preserved:
    """The newest checkpoints, and the one that `Checkpoints.kept` names when one is written."""

    checkpoints: Checkpoints
    keep: int | None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Tell for each checkpoint, oldest first, whether it stays."""
        newest = len(checkpoints) if self.keep is None else self.keep
        return [
            index >= len(checkpoints) - newest or found.step == self.checkpoints.kept
            for index, found in enumerate(checkpoints)
        ]


def complete_steps(directory: str | Path) -> list[int]:
    """Return the steps with a complete checkpoint in `directory`, oldest first; other files there are not ours."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and (entry / _MARK).is_file())


def restore(
    directory: str | Path,
    target: TrainState,
    *,
    step: int | None = None,
    filled: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Return the state of `step` placed as `target` says (shapes, dtypes, shardings), and its meta.

    Another mesh, layers that are stacked there and not here or the reverse, and another padding of parameters are no
    hindrance; `filled` has by path the shapes of padded ones without it.

    Without `step` it is the newest that can be read: a damaged one is passed over with a warning. Raises
    CheckpointError if there is none, or if it holds other parameters than `target`.
    """
    steps = complete_steps(directory)
    if step is not None and step not in steps:
        raise CheckpointError(f"{directory} holds no complete checkpoint of step {step}; complete: {listed(steps)}.")
    if not steps:
        raise CheckpointError(f"{directory} holds no complete checkpoint: start the training without resuming.")
    damage = ""
    for candidate in [step] if step is not None else reversed(steps):
        folder = Path(directory).absolute() / str(candidate)
        reason, read = "Another process cannot read its part.", None
        try:
            read = _read(folder, target, filled or {})
        except DistaffError:
            raise
        except Exception as error:
            reason = _reason(error)
        damage = f"The checkpoint {folder} is damaged and cannot be read: {reason}"
        # Each process reads a part of it, and all must go on from the same step.
        answer = everywhere(read is not None, within=_MOST_APART)
        if answer is None:
            # Inside Orbax the others wait for this process, and can wait for ever.
            raise CheckpointError(f"{damage} Move it away, and start all processes again.")
        if answer and read is not None:
            return read
        logger.warning("%s", damage)
    raise CheckpointError(damage)


def read_params(folder: str | Path, target: Tree) -> Tree:
    """Return the parameters alone of the checkpoint `folder` (`.../checkpoints/<step>`), placed as `target` says."""
    return _restore_items(Path(folder).absolute(), {"params": target}, {}, with_meta=False)["params"]


def read_trained(
    folder: str | Path, target: TrainState, *, filled: Mapping[str, tuple[int, ...]] | None = None
) -> TrainState:
    """Return `target` with parameters, their average and what was carried beside them of the checkpoint `folder`."""
    names = ["params", *(name for name in BESIDES if getattr(target, name) is not None)]
    wanted = {name: item for name, item in _items(abstract_state(target)).items() if name in names}
    read = _restore_items(Path(folder).absolute(), wanted, filled or {}, with_meta=False)
    return replace(target, **{name: read[name] for name in names})


def _read(folder: Path, target: TrainState, filled: Mapping[str, tuple[int, ...]]) -> tuple[TrainState, dict[str, Any]]:
    if (folder / "carried").exists() != (target.carried is not None):
        there, here = ("some", "none") if target.carried is None else ("none", "some")
        raise CheckpointError(
            f"The checkpoint {folder} holds {there} of what a run carries besides parameters (running statistics), and "
            f"this run has {here}: resume with the model that the run was begun with."
        )
    if (folder / "average").exists() != (target.average is not None):
        there, here = ("an", "without") if target.average is None else ("no", "with")
        raise CheckpointError(
            f"The checkpoint {folder} holds {there} average of the parameters, and this run is {here} ema_decay: "
            "resume as the run was begun."
        )
    read = _restore_items(folder, _items(target), filled, with_meta=True)
    opt_state = jax.tree.map(_typed, read["opt_state"], target.opt_state)
    rng = _typed(read["loop"]["rng"], target.rng)
    besides = {name: None if getattr(target, name) is None else read[name] for name in BESIDES}
    step = read["loop"]["step"]
    return TrainState(step=step, params=read["params"], opt_state=opt_state, rng=rng, **besides), read["meta"]


def _items(state: TrainState) -> dict[str, Tree]:
    """Return what is written of `state` by the names of the items."""
    loop = {"step": state.step, "rng": state.rng}
    items = {"params": state.params, "opt_state": _plain(state.opt_state), "loop": _plain(loop)}
    besides = {name: getattr(state, name) for name in BESIDES}
    return items | {name: item for name, item in besides.items() if item is not None}


def _restore_items(
    folder: Path, items: dict[str, Tree], filled: Mapping[str, tuple[int, ...]], *, with_meta: bool
) -> Any:
    """Read the named items of the checkpoint `folder` after comparing all their shapes."""
    # Orbax warns about each item of a folder that it is not told how to read, wanted or not.
    handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in ("params", "opt_state", "loop")}
    handlers |= {name: ocp.StandardCheckpointHandler() for name in BESIDES if (folder / name).exists()}
    handlers["meta"] = ocp.JsonCheckpointHandler()
    step = int(folder.name)
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(folder.parent, item_handlers=handlers, options=options) as reader:
        found = reader.item_metadata(step)
        if lost := [name for name in items if getattr(found[name], "tree", found[name]) is None]:
            raise ValueError(f"it does not say what its {listed(lost)} hold")
        trees = {name: getattr(found[name], "tree", found[name]) for name in items}
        stored = {name: as_stored(item, _shapes(trees[name]), filled) for name, item in items.items()}
        _compare(trees, stored, folder)
        args: dict[str, Any] = {name: ocp.args.StandardRestore(item) for name, item in stored.items()}
        if with_meta:
            args["meta"] = ocp.args.JsonRestore()
        read = reader.restore(step, args=ocp.args.Composite(**args))
    if with_meta and not isinstance(read["meta"], dict):
        raise ValueError("its meta is no JSON object")
    if lost := cut_off(read["params"], items["params"]) if "params" in items else []:
        raise CheckpointError(
            f"The checkpoint {folder} has a larger vocabulary than this run, in {listed(lost)}: resume with the config "
            "and the tokenizer that the run was begun with."
        )
    return {**read, **{name: as_wanted(read[name], item) for name, item in items.items()}}


def _compare(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError with every array that is missing, left over, or of another shape or dtype."""
    have = _specifications(found)
    want = _specifications(wanted)
    faults = [f"{path} is missing" for path in want if path not in have]
    faults += [f"{path} is not in the model or optimizer" for path in have if path not in want]
    faults += [
        f"{path} is {have[path]} there and {want[path]} here"
        for path in want
        if path in have and have[path] != want[path]
    ]
    if faults:
        raise CheckpointError(
            f"The checkpoint {folder} does not fit this run in {len(faults)} places: {listed(faults, 5)}."
        )


def _specifications(tree: Tree) -> dict[str, str]:
    """Return `{path: "float32[4, 8]"}`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_of(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Return the shapes of stored arrays by path, and () where an optimizer keeps nothing of a parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {path_of(path): tuple(getattr(leaf, "shape", ())) for path, leaf in leaves}


def _plain(tree: Tree) -> Tree:
    """Replace typed random keys (or their shapes) by the numbers that can be written."""

    def numbers(leaf: Any) -> Any:
        if not _is_key(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            return jax.random.key_data(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)

    return jax.tree.map(numbers, tree)


def _typed(leaf: jax.Array, like: Any) -> jax.Array:
    """Turn the numbers of a random key back into a key where `like` is one."""
    return jax.random.wrap_key_data(leaf) if _is_key(like) else leaf


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _reason(error: Exception) -> str:
    """Return the first line of an error as the end of a sentence, without the long specification that follows it."""
    text = str(error).strip().splitlines()
    return f"{_DETAILS.split(text[0])[0].rstrip('.')}." if text else f"{type(error).__name__}."
