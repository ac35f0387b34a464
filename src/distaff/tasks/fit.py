"""`distaff fit`: whether a training fits a slice of TPUs, before one is rented; it works offline and without a TPU.

    distaff fit clm --topology v5e-8 --model_type gpt2 --block_size 1024 --per_device_train_batch_size 8 --scan_layers
    distaff fit gpt2-medium-config --topology v3-8 --max_seq_length 512

It takes the flags of the training and compiles its step, as it is, by the compiler in libtpu (`pip install
'distaff[train,tpu]'`), or with --devices 8 for simulated devices of the CPU, whose figures are others than a TPU's.
Neither data nor tokenizer nor weights are needed: a step is its shapes, those of the longest rows that the flags allow.
The exit code is 0 where the asked training fits, and 1 where it does not; then what needs less memory is tried, and the
flags are printed that make it fit.
"""

import dataclasses
import importlib.util
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distaff.core.errors import DistaffError, MissingExtraError, UsageError
from distaff.models import FAMILIES
from distaff.tasks import _levers, _report, _slices
from distaff.tasks import _recipe as recipes
from distaff.tasks._flags import ModelFlags, TrainingFlags, check_positive, flag
from distaff.tasks._report import Answer

logger = logging.getLogger("distaff")

# The recipe of a bare config: its module, class of flags and flag of a row's length; of all others, masked words.
_RECIPES = {
    **dict.fromkeys(("gpt2", "gpt_neo", "opt"), ("clm", "ClmFlags", "block_size")),
    **dict.fromkeys(("t5", "mt5"), ("t5_mlm", "T5MlmFlags", "max_seq_length")),
    **dict.fromkeys(("bart", "mbart"), ("bart_dlm", "BartDlmFlags", "max_seq_length")),
    **dict.fromkeys(("vit", "resnet"), ("image_classification", "ImageClassificationFlags", None)),
    "electra": ("electra", "ElectraFlags", "max_seq_length"),
}
_OTHERS = ("mlm", "MlmFlags", "max_seq_length")


@dataclass(kw_only=True)
class FitFlags:
    """For what devices to compile."""

    topology: str | None = flag(
        None, "Slice to compile for: v5e-8, v3-8, or a kind and a grid of chips such as v5e:4x4; needs libtpu."
    )
    devices: int | None = flag(None, "Instead of a slice: so many simulated devices of the CPU.")
    device_memory: float | None = flag(
        None, "GiB that may be used of a device, by default what programs may have on a chip of the slice."
    )
    search: bool = flag(True, "Where it does not fit, try what needs less memory, and print the first that fits.")

    def check(self) -> None:
        """Raise `UsageError` for devices that cannot be."""
        check_positive(self, "devices")
        if (self.topology is None) == (self.devices is None):
            raise UsageError("Say for what to compile, one of both: --topology v5e-8, or --devices 8 for the CPU.")
        if self.device_memory is not None and not 0 < self.device_memory < math.inf:
            raise UsageError(f"--device_memory is {self.device_memory}: it must be above 0, in GiB.")
        if self.topology is not None:
            _slices.topology(self.topology)
            if importlib.util.find_spec("libtpu") is None:
                raise MissingExtraError("libtpu", "tpu", f"Compiling for '{self.topology}'")

    @property
    def limit(self) -> int | None:
        """Bytes of a device, None where nobody says."""
        if self.device_memory is not None:
            return int(self.device_memory * _slices.GIB)
        return None if self.topology is None else _slices.memory(self.topology)


@dataclass(kw_only=True)
class BareFlags(ModelFlags, TrainingFlags):
    """Flags of `distaff fit FOLDER`: a config alone, and what all recipes share."""

    max_seq_length: int | None = flag(None, "Tokens a row, by default as many as the recipe takes.")


def run(recipe: str | None, flags: Any, fit: FitFlags) -> int:
    """Print what `distaff train RECIPE` needs of each device, and return 0 where it fits; None: that of a config."""
    fit.check()
    if recipe is None:
        recipe, flags = of_config(flags)
    # The shapes are the config's; weights are not read, and nothing is reported.
    name = flags.config_name or flags.model_name_or_path
    flags = dataclasses.replace(flags, config_name=name, model_name_or_path=None, report_to=["none"])
    where = fit.topology or f"{fit.devices} simulated devices of the CPU"
    logger.info("Compiling the step of '%s' for %s ...", recipe, where)
    asked = compiled(recipe, flags, fit)
    _report.show(recipe, where, asked, fit.limit)
    if asked.fits(fit.limit) or fit.limit is None:
        return 0
    if fit.search:
        print(*found_lines(*search(recipe, flags, fit, asked), fit.limit), sep="\n")
    return 1


def of_config(flags: BareFlags) -> tuple[str, Any]:
    """Return the recipe that pretrains the model of a config, and its flags."""
    config = recipes.load_config(flags, None, flags.hub_token)
    if config.model_type not in FAMILIES:
        raise UsageError(f"distaff has no models of type '{config.model_type}': it has {', '.join(FAMILIES)}.")
    name, class_name, length = _RECIPES.get(config.model_type, _OTHERS)
    values = {each.name: getattr(flags, each.name) for each in dataclasses.fields(flags)}
    asked = values.pop("max_seq_length")
    if length is not None:
        values[length] = asked
    elif asked is not None:
        raise UsageError("Images have no tokens: leave --max_seq_length out.")
    module = importlib.import_module(f"distaff.tasks.{name}")
    return name.replace("_", "-"), getattr(module, class_name)(**values)


def compiled(recipe: str, flags: Any, fit: FitFlags) -> Answer:
    """Compile the step in a process of its own and return what it says.

    Raises the `UsageError` that the recipe raises, and `DistaffError` where the process ends without an answer.
    """
    question = {
        "module": f"distaff.tasks.{recipe.replace('-', '_')}",
        "flags_class": type(flags).__name__,
        "flags": dataclasses.asdict(flags),
        "topology": fit.topology,
        "devices": fit.devices,
        "limit": fit.limit,
    }
    environment = {**os.environ, **_slices.ENVIRONMENT, "JAX_NUM_CPU_DEVICES": str(fit.devices or 1)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "distaff.tasks._fit_worker", str(path)]
        done = subprocess.run(
            command, input=json.dumps(question), env=environment, capture_output=True, text=True, check=False
        )
        if not path.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise DistaffError(
                f"The compiler ended with code {done.returncode} and without an answer: "
                f"{lines[-1].strip().rstrip('.') if lines else 'it printed nothing'}."
            )
        answer = json.loads(path.read_text())
    if "error" in answer:
        raise (UsageError if answer["usage"] else DistaffError)(answer["error"])
    return Answer.from_json(answer)


def search(recipe: str, flags: Any, fit: FitFlags, asked: Answer) -> tuple[_levers.Changes | None, dict[str, Answer]]:
    """Return the first changes of the flags with which the step fits, and the answer to all that was compiled.

    Answers stand under the changes as they are typed; `asked` is that to the flags themselves.
    """
    answers = {"": asked}

    def fits(changes: _levers.Changes) -> bool:
        text = words(changes)
        if text not in answers:
            logger.info("Trying %s ...", text)
            answers[text] = compiled(recipe, dataclasses.replace(flags, **changes), fit)
            least = "at least " if answers[text].footprint.peak is None else ""
            logger.info("... %s%s GiB", least, _report.gib(answers[text].footprint.needed))
        return answers[text].fits(fit.limit)

    setting = _levers.Setting(
        flags=dataclasses.asdict(flags), mesh=asked.mesh, rows=asked.rows, local=asked.local, able=asked.able
    )
    return _levers.search(setting, fits), answers


def found_lines(changes: _levers.Changes | None, answers: Mapping[str, Answer], limit: int | None) -> list[str]:
    """Return what is to be said of a search."""
    if changes is not None:
        text = words(changes)
        return ["", f"It fits with {text}", *_report.lines(answers[text], limit)]
    # One whose peak is not known needs more than what is held.
    best, answer = min(answers.items(), key=lambda pair: (pair[1].footprint.peak is None, pair[1].footprint.needed))
    least = "at least " if answer.footprint.peak is None else ""
    missing = answer.footprint.needed - (answer.footprint.limit or limit or 0)
    tried = f"with {best}" if best else "as it was asked for"
    return ["", f"Nothing that was tried fits; {tried} {least}{_report.gib(missing)} GiB are missing: take more chips."]


def words(changes: Mapping[str, Any]) -> str:
    """Return flags as they are typed."""
    parts = [f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}" for name, value in changes.items()]
    return " ".join(parts)
