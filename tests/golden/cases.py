"""Golden cases: what a PyTorch class of Transformers answered, and the checkpoint folder it answered from.

No weights are stored. A tensor is a function of its Hugging Face name and shape, so a case holds the names and shapes
that `save_pretrained` wrote, and `write` rebuilds the folder. `make.py` makes the files; this module needs numpy and
safetensors only, so that it runs in every environment the values come from.

`FAMILY.json` holds one case a line: class, config, keys, runs, gradients. `FAMILY.npz` holds the arrays, by
`case/run/inputs/name` and `case/run/outputs/name`.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One call: the arrays that went in, and the output fields that came back (hidden states are `hidden_states/0`, ...)."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One PyTorch class built from one config."""

    family: str
    name: str
    class_name: str
    config: dict[str, Any]
    keys: dict[str, tuple[int, ...]]
    # Keys that are in the file and take no part in the forward pass.
    dead: tuple[str, ...] = ()
    runs: dict[str, Run] = field(default_factory=dict)
    # Of the mean cross-entropy against the run's `labels`: name -> (norm, product with `direction`).
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)
    loss: float | None = None

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}"


def _generator(text: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(text.encode()))


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight called `name`; nothing in it stands at its neutral value."""
    if name.endswith("num_batches_tracked"):
        return np.array(3, np.int64)
    values = _generator(name).normal(size=shape)
    if re.search(r"(layer_?norm|ln_\w|normalization)\.weight$", name, re.IGNORECASE):
        values = 1 + 0.1 * values
    elif name.endswith("running_var"):
        values = 0.5 + np.abs(values)
    elif len(shape) == 4:  # a convolution, which sums over many inputs
        values *= np.prod(shape[1:]) ** -0.5
    else:
        values *= 0.2
    return values.astype(np.float32)


def direction(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the vector that the gradient of `name` is projected on."""
    return _generator(f"direction of {name}").normal(size=shape)


def summary(name: str, gradient: np.ndarray) -> tuple[float, float]:
    """Return (norm, projection) of a gradient."""
    gradient = np.asarray(gradient, np.float64)
    numbers = np.linalg.norm(gradient), (gradient * direction(name, gradient.shape)).sum()
    return tuple(float(f"{number:.9g}") for number in numbers)


def tensors(case: Case) -> dict[str, np.ndarray]:
    """Return the case's whole state dict."""
    return {name: tensor(name, shape) for name, shape in case.keys.items()}


def write(
    case: Case,
    folder: Path,
    *,
    change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]] = dict,
    **config: Any,
) -> Path:
    """Write `config.json` and `model.safetensors`; `change` maps the state dict first, `config` overrides fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**case.config, **config}, indent=2))
    state = {name: np.asarray(value, order="C") for name, value in change(tensors(case)).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read(family: str) -> dict[str, Case]:
    """Return the golden cases of `family` by name."""
    arrays: dict[str, Run] = {}
    with np.load(GOLDEN / f"{family}.npz") as stored:
        for path in stored.files:
            case, run, kind, name = path.split("/", 3)
            getattr(arrays.setdefault(f"{case}/{run}", Run({}, {})), kind)[name] = stored[path]
    cases = {}
    for name, raw in json.loads((GOLDEN / f"{family}.json").read_text())["cases"].items():
        cases[name] = Case(
            family=family,
            name=name,
            class_name=raw["class"],
            config=raw["config"],
            keys={key: tuple(shape) for key, shape in raw["keys"].items()},
            dead=tuple(raw["dead"]),
            runs={run: arrays[f"{name}/{run}"] for run in raw["runs"]},
            gradients={key: tuple(pair) for key, pair in raw.get("gradients", {}).items()},
            loss=raw.get("loss"),
        )
    return cases


def store(family: str, cases: Mapping[str, Case], versions: Mapping[str, str]) -> None:
    """Write the golden files of `family`."""
    lines, arrays = [], {}
    for name, case in cases.items():
        raw: dict[str, Any] = {
            "class": case.class_name,
            "config": case.config,
            "keys": case.keys,
            "dead": case.dead,
            "runs": list(case.runs),
        }
        if case.gradients:
            raw |= {"loss": case.loss, "gradients": case.gradients}
        lines.append(f"{json.dumps(name)}: {json.dumps(raw)}")
        for run, values in case.runs.items():
            for kind in ("inputs", "outputs"):
                arrays |= {f"{name}/{run}/{kind}/{key}": value for key, value in getattr(values, kind).items()}
    body = ",\n".join(lines)
    (GOLDEN / f"{family}.json").write_text(f'{{"versions": {json.dumps(versions)},\n"cases": {{\n{body}\n}}}}\n')
    np.savez_compressed(GOLDEN / f"{family}.npz", **arrays)
