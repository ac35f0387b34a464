"""What all checks stand on: golden cases by name, their folders, models loaded from them, flat outputs."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import distaff
from golden import cases as golden

TOLERANCE = 1e-4
# Where the compared value is at most one layer deep, and between two routes of the same model.
CLOSE = 1e-5


def model_class(case: golden.Case) -> type:
    return getattr(distaff, f"Flax{case.class_name}")


def config_of(case: golden.Case, **fields: Any) -> Any:
    """Return the case's config as a user builds it, with other `fields`."""
    config = {**case.config, **fields}
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


def layers_of(case: golden.Case) -> int:
    """Return the number of layers, however the case's config calls it."""
    config = config_of(case)
    return config.num_hidden_layers if hasattr(config, "num_hidden_layers") else len(config.depths)


def tensor_inputs(run: golden.Run) -> dict[str, np.ndarray]:
    """Return the run's inputs without its labels, which never go into a model."""
    return {name: value for name, value in run.inputs.items() if name != "labels"}


def flat_outputs(outputs: Any) -> dict[str, np.ndarray]:
    """Return an output's arrays by the names of golden files (`hidden_states/0`, ...)."""
    flat = {}
    for name, value in outputs.items():
        if isinstance(value, tuple):
            flat |= {f"{name}/{index}": np.asarray(entry, np.float32) for index, entry in enumerate(value)}
        elif value is not None:
            flat[name] = np.asarray(value, np.float32)
    return flat


def assert_parity(case: golden.Case, model: Any) -> None:
    """Fail unless `model` answers every run of `case` as PyTorch did."""
    compared, layers = 0, layers_of(case)
    for name, run in case.runs.items():
        wanted = run.outputs
        if not wanted or "sequences" in wanted or name == "train":  # what is no answer of one call
            continue
        states = [name for name in ("hidden_states", "attentions") if any(key.startswith(name) for key in wanted)]
        outputs = model(**tensor_inputs(run), **{f"output_{name}": True for name in states})
        found = flat_outputs(outputs)
        for key, expected in wanted.items():
            near = key == "hidden_states/0" or layers == 1
            message = f"{case.id}, run {name}, {key}"
            assert found[key].shape == expected.shape, message
            np.testing.assert_allclose(found[key], expected, rtol=0, atol=CLOSE if near else TOLERANCE, err_msg=message)
            compared += 1
    assert compared


def assert_trees_equal(one: Any, other: Any, *, atol: float = 0.0) -> None:
    """Fail unless both trees have the same paths, dtypes and, within `atol`, values (0: bit for bit)."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, left), right in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype, jax.tree_util.keystr(path)
        left, right = np.asarray(left), np.asarray(right)
        if atol:
            np.testing.assert_allclose(left, right, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))
        else:
            np.testing.assert_array_equal(left, right, err_msg=jax.tree_util.keystr(path))


def cross_entropy(logits: jax.Array, labels: np.ndarray) -> jax.Array:
    """Return the mean cross-entropy of `[..., classes]` logits where labels are not negative."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()


def loss_and_gradients(model: Any, run: golden.Run, **options: Any) -> tuple[jax.Array, Any]:
    """Return the loss on the run's labels and its gradient, of the model as a user calls it inside `jit`."""

    def loss(params):
        outputs = model(**tensor_inputs(run), params=params, **options)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs  # beside new statistics
        return cross_entropy(outputs.logits, run.inputs["labels"])

    return jax.jit(jax.value_and_grad(loss))(model.params)


class Common:
    """The golden cases of one family, its folders and models."""

    family: ClassVar[str]
    # Names of cases: the base model, one with logits `[batch, length, vocab]`, and one whose head is not of the base.
    base: ClassVar[str]
    lm: ClassVar[str]
    headed: ClassVar[str]
    # A row padded on the left gives what it gives without padding, with no position_ids passed.
    left_padding_is_free: ClassVar[bool] = False
    # Fields of a config that the family refuses.
    refused: ClassVar[tuple[dict[str, Any], ...]] = ()
    # PyTorch's names of two tensors of layer `{}`; fields that name dropout rates, the first that of attention; and
    # configs: of one layer, of many parameters with deviation 0.03, of more than 4e9 parameters.
    layer_bias: ClassVar[str]
    layer_weight: ClassVar[str]
    dropout: ClassVar[tuple[str, ...]]
    shallow: ClassVar[dict[str, Any]]
    wide: ClassVar[dict[str, Any]]
    huge: ClassVar[dict[str, Any]]
    # By the end of a parameter's path, the factor on the deviation of its random weights where it is not 1.
    deviations: ClassVar[dict[str, float]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "family"):
            cls.cases = golden.read(cls.family)

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases.values(), ids=list(self.cases))
        if "graded_case" in metafunc.fixturenames:
            graded = {name: case for name, case in self.cases.items() if case.gradients}
            metafunc.parametrize("graded_case", graded.values(), ids=list(graded))
        if "lm_or_headed" in metafunc.fixturenames:
            metafunc.parametrize("lm_or_headed", sorted({self.lm, self.headed}))
        if "dropout_field" in metafunc.fixturenames:
            metafunc.parametrize("dropout_field", [None, *self.dropout])
        if "old_folder" in metafunc.fixturenames:
            old = sorted((golden.GOLDEN / "msgpack").glob(f"{self.family}-*"))
            metafunc.parametrize("old_folder", old, ids=[folder.name for folder in old])

    @pytest.fixture
    def store(self, tmp_path_factory) -> "Store":
        """The family's folders and models, one `Store` for all checks."""
        if "_store" not in vars(type(self)):
            type(self)._store = Store(tmp_path_factory.mktemp(self.family))
        return self._store

    @pytest.fixture
    def keep(self, tmp_path) -> Iterator[Path]:
        """A folder for what a check saves: under $DISTAFF_KEEP_SAVED, for `make.py --verify`, or temporary."""
        kept = os.environ.get("DISTAFF_KEEP_SAVED")
        return Path(kept) if kept else tmp_path

    def gradient_case(self) -> tuple[golden.Case, golden.Run]:
        case = self.cases[self.lm]
        return case, case.runs["gradient"]

    def training_options(self, case: golden.Case) -> dict[str, Any]:
        """What makes a call compute what PyTorch's gradients of `case` were taken of."""
        return {}

    def kept_by(self, params: Any, file_format: str) -> Any:
        """Return the parameters as a file of that format keeps them."""
        return params

    def first_position(self, case: golden.Case) -> int:
        """The position of a row's first real token."""
        return 0

    def one_layer(self, case: golden.Case, *, config: dict[str, Any] | None = None, **options: Any) -> Any:
        """Return a random model of the case's class with one layer: what compiles fast and still computes something."""
        return model_class(case)(config_of(case, **{**self.shallow, **(config or {})}), **options)


class Store:
    """Folders of golden cases, and models loaded from them, each made once."""

    def __init__(self, root: Path):
        self.root = root
        self.models: dict[Any, Any] = {}

    def folder(self, case: golden.Case, **config: Any) -> Path:
        """Return the checkpoint folder of `case`, with some config fields changed."""
        name = re.sub(r"[^\w.]+", "-", f"{case.name}-{sorted(config.items())}")
        return self.root / name if (self.root / name).exists() else golden.write(case, self.root / name, **config)

    def model(self, case: golden.Case, **options: Any) -> Any:
        """Return the case's model; the same one for the same options."""
        key = case.name, *sorted((name, str(value)) for name, value in options.items())
        if key not in self.models:
            self.models[key] = model_class(case).from_pretrained(self.folder(case), **options)
        return self.models[key]
