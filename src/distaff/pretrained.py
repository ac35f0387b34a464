"""`FlaxPreTrainedModel`: a config, a Linen module and its parameters, with loading, saving and publishing."""

import dataclasses
import difflib
import logging
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from distaff.core.apply import jitted_apply
from distaff.core.errors import UsageError, listed
from distaff.core.mesh import checked_mesh
from distaff.core.precision import cast_floating, cast_shapes, dtype_of, is_floating
from distaff.core.processes import gathered
from distaff.core.tree import Tree, flatten, unflatten
from distaff.hub import open_checkpoint, push_folder, resolve, save_msgpack, save_safetensors
from distaff.loading import (
    FamilyNames,
    LoadingReport,
    configure,
    is_untied,
    load_params,
    random_params,
    refuse_misfits,
)
from distaff.placing import Placed
from distaff.resizing import padded_for, resize_token_embeddings, without_padding
from distaff.weights import (
    STATISTICS,
    Leaf,
    Row,
    Tie,
    decays,
    generic_rows,
    held,
    leaves,
    matrix_axis,
    shapes_by_rows,
    tensors_to_write,
)

logger = logging.getLogger(__name__)


class FlaxPreTrainedModel(Placed):
    """Base of all models, ours and a user's own.

    A subclass sets `config_class`, `base_model_prefix` and `module_class`. A family of ours also says its `rows`; a
    module without rows is saved under its own paths. The model holds parameters for convenience: pass `params` to any
    call and it is a pure function of them. Where the module keeps running statistics (BatchNorm), `params` is
    `{"params": ..., "batch_stats": ...}`, and a call with `train=True` returns `(outputs, {"batch_stats": ...})`.

    Args:
        config: an instance of `config_class`.
        module: the Linen module, by default `module_class(config=config, dtype=dtype, param_dtype=param_dtype,
            **module_fields)`.
        input_shape: shape of the main input for initialisation, `(1, 1)` by default.
        seed: of the random parameters.
        dtype: dtype of the computation. Norms, softmax and losses stay float32.
        param_dtype: dtype in which parameters are kept.
        mesh: devices to place the parameters on, by the logical axes of their rows, and to compute on, as a mesh or as
            in `data=2,tensor=4`. A vocabulary that does not divide is padded there; nobody sees it
            (`resize_token_embeddings`).
        _do_init: False keeps shapes only; parameters then come with each call.
        module_fields: `gradient_checkpointing`, `scan_layers`, `attn_implementation`; see docs/parallelism.md.
    """

    config_class: ClassVar[Any] = None
    base_model_prefix: ClassVar[str] = ""
    main_input_name: ClassVar[str] = "input_ids"
    module_class: ClassVar[Any] = None
    # Model types of other configs whose checkpoints mean the same as those of `config_class`.
    compatible_model_types: ClassVar[tuple[str, ...]] = ()
    # Patterns of checkpoint keys that have no meaning for us.
    ignored_keys: ClassVar[tuple[str, ...]] = ()
    # Whether training draws random numbers, and so needs a key.
    draws_dropout: ClassVar[bool] = True

    def __init__(
        self,
        config,
        module: nn.Module | None = None,
        *,
        input_shape: tuple[int, ...] = (1, 1),
        seed: int = 0,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        mesh: Mesh | str | None = None,
        _do_init: bool = True,
        **module_fields: Any,
    ):
        if config is None:
            raise UsageError(f"{type(self).__name__} needs a config.")
        self.check_config(config)
        self.mesh = None if mesh is None else checked_mesh(mesh)
        self.config = padded_for(config, self.mesh) if module is None else config
        self.dtype, self.param_dtype = dtype_of(dtype), dtype_of(param_dtype)
        self.input_shape, self.seed = input_shape, seed
        self.module = module if module is not None else self._make_module(**module_fields)
        self.loading_report = LoadingReport()
        self.params_shape_tree = self._shapes()
        self._statistics = STATISTICS if STATISTICS in self.params_shape_tree else None
        self._jitted = jitted_apply(self.module, self._statistics)
        self._params = self.init_weights(jax.random.key(seed), input_shape) if _do_init else None

    # What a family says about itself.

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for a config that the family does not implement as PyTorch does."""

    @classmethod
    def rows(cls, module: nn.Module) -> list[Row]:
        """Rows of all parameters of `module`; none for a module that is a user's own."""
        return []

    @classmethod
    def base_rows(cls, config) -> list[Row]:
        """Rows of the whole base model, without its prefix."""
        return []

    @classmethod
    def ties(cls, config) -> tuple[Tie, ...]:
        """Tensors that repeat another one unless a checkpoint says otherwise."""
        return ()

    def dummy_inputs(self, input_shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Inputs of `input_shape` that are good enough to trace the module."""
        floating = self.main_input_name in ("pixel_values", "input_values")
        return {self.main_input_name: jnp.ones(input_shape, jnp.float32 if floating else jnp.int32)}

    # Parameters.

    def init_weights(self, rng: jax.Array, input_shape: tuple[int, ...], params: Tree | None = None) -> Tree:
        """Return random parameters for `rng`; where `params` has a leaf, that one is kept."""
        if not hasattr(rng, "dtype"):
            raise UsageError(f"init_weights takes a random key and not {rng!r}: pass jax.random.key({rng!r}).")
        if not self.rows(self.module):
            made = jax.jit(self.module.init)({"params": rng}, **self.dummy_inputs(input_shape))
            flat = flatten(held(made, lambda params: cast_floating(params, self.param_dtype)))
        else:
            data = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
            flat = random_params(
                self._table,
                flatten(self.params_shape_tree),
                seed=int.from_bytes(np.asarray(data).tobytes(), "big"),
                initializer_range=getattr(self.config, "initializer_range", 0.02),
                sharding=self._sharding,
                vocab=getattr(self.config, "vocab_size", None),
            )
        if params is not None:
            given = flatten(params)
            refuse_misfits({**flat, **given}, self.params_shape_tree, name=type(self).__name__)
            flat.update(given)
        return unflatten(flat)

    @property
    def params(self) -> Tree:
        """The parameters, nested dicts of arrays."""
        if self._params is None:
            raise UsageError(
                f"This {type(self).__name__} was made with _do_init=False and holds no parameters: "
                "assign model.params, pass params=..., or make them with model.init_weights(rng, input_shape)."
            )
        return self._params

    @params.setter
    def params(self, params: Tree) -> None:
        refuse_misfits(params, self.params_shape_tree, name=type(self).__name__)
        self._params = dict(params)

    def to_bf16(self, params: Tree, mask: Tree | None = None) -> Tree:
        """Cast the floating leaves of `params` to bfloat16; where `mask` is False, leave them."""
        return cast_floating(params, jnp.bfloat16, mask)

    def to_fp16(self, params: Tree, mask: Tree | None = None) -> Tree:
        """Cast the floating leaves of `params` to float16; where `mask` is False, leave them."""
        return cast_floating(params, jnp.float16, mask)

    def to_fp32(self, params: Tree, mask: Tree | None = None) -> Tree:
        """Cast the floating leaves of `params` to float32; where `mask` is False, leave them."""
        return cast_floating(params, jnp.float32, mask)

    def decay_mask(self) -> Tree:
        """Return booleans, shaped as the parameters, that are False for biases and norms."""
        return unflatten({path: decays(leaf.kind) for path, leaf in self._table.items()})

    def matrices(self) -> Tree:
        """Return by parameter the axis of what goes into a kernel in layers, -2 or -3, and 0 for all else."""
        return unflatten({path: matrix_axis(leaf) for path, leaf in self._table.items()})

    resize_token_embeddings = resize_token_embeddings

    def num_params(self, params: Tree | None = None) -> int:
        """Return how many numbers the parameters hold."""
        return sum(int(np.prod(leaf.shape)) for leaf in flatten(params or self.params_shape_tree).values())

    # Calling.

    def __call__(
        self,
        inputs,
        *,
        params: Tree | None = None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        **options: Any,
    ):
        """Apply the module to its main input `inputs`; families with more inputs name them in their own `__call__`."""
        return self.run({self.main_input_name: inputs}, params=params, dropout_rng=dropout_rng, train=train, **options)

    def run(
        self,
        inputs: dict[str, Any],
        *,
        params: Tree | None = None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        **options: Any,
    ):
        """Apply the module, jitted, to named arrays (None where absent) with static `options`."""
        if train and dropout_rng is None and self.draws_dropout:
            raise UsageError("train=True draws dropout masks: pass dropout_rng=jax.random.key(...).")
        given = {name: value for name, value in inputs.items() if value is not None}
        # A list is an array that is not made yet; other containers, such as a cache, hold arrays.
        arrays = jax.tree.map(jnp.asarray, given, is_leaf=lambda value: isinstance(value, list))
        params = self.params if params is None else params
        if list(params) == ["params"]:
            raise UsageError("params is what a module's init returns: pass what is in it, params=variables['params'].")
        with self.computing(params, arrays):
            return self._jitted(params, arrays, dropout_rng, train=train, options=tuple(sorted(options.items())))

    # Loading and saving.

    @classmethod
    def from_pretrained(
        cls,
        name_or_dir,
        *,
        config=None,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        revision: str | None = None,
        token: str | None = None,
        subfolder: str = "",
        local_files_only: bool = False,
        ignore_mismatched_sizes: bool = False,
        mesh: Mesh | str | None = None,
        seed: int = 0,
        _do_init: bool = True,
        **overrides: Any,
    ):
        """Load a model from a folder or the Hub: safetensors, pytorch_model.bin or flax_model.msgpack.

        Names in `overrides` that the config has change it (`num_labels=5`), others are fields of the module
        (`scan_layers=True`). Head weights that the checkpoint lacks are made from `seed` and reported in
        `loading_report`. With `_do_init=False`, returns `(model, params)`.

        Raises `CheckpointError` where tensors of the base model are missing, left over or of another shape.
        """
        where: dict[str, Any] = {"revision": revision, "token": token, "subfolder": subfolder}
        folder = resolve(str(name_or_dir), local_files_only=local_files_only, **where)
        config, fields = configure(folder, config, overrides, model_class=cls)
        checkpoint = open_checkpoint(folder)
        family = FamilyNames(
            cls.base_model_prefix, cls._is_base(), tuple(cls.base_rows(config)), tuple(cls.ignored_keys)
        )
        if getattr(config, "tie_word_embeddings", False) and is_untied(checkpoint, cls.ties(config), family):
            logger.info("The file holds a head that differs from the embeddings: it is loaded as untied.")
            config.tie_word_embeddings = False
        model = cls(config, seed=seed, dtype=dtype, param_dtype=param_dtype, mesh=mesh, _do_init=False, **fields)
        flat, model.loading_report = load_params(
            checkpoint,
            model._table,
            flatten(model.params_shape_tree),
            family=family,
            ties=cls.ties(config),
            seed=seed,
            initializer_range=getattr(config, "initializer_range", 0.02),
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            sharding=model._sharding,
            vocab=getattr(config, "vocab_size", None),
        )
        model.loading_report.log(cls.__name__, str(name_or_dir))
        if not _do_init:
            return model, unflatten(flat)
        model._params = unflatten(flat)
        return model

    def save_pretrained(
        self,
        directory,
        params: Tree | None = None,
        *,
        save_format: Literal["safetensors", "msgpack"] = "safetensors",
        max_shard_size: int | str = "5GB",
        push_to_hub: bool = False,
        repo_id: str | None = None,
        token: str | None = None,
    ) -> None:
        """Write config and weights (the first process; all must call it): safetensors, or msgpack as old Flax did."""
        if save_format not in ("safetensors", "msgpack"):
            raise UsageError(f"save_format is 'safetensors' or 'msgpack', not '{save_format}'.")
        folder = Path(directory)
        if folder.is_file():
            raise UsageError(f"'{folder}' is a file: name a folder to save the model in.")
        preferred = [*folder.glob("model*.safetensors*"), *folder.glob("pytorch_model*.bin*")]
        if save_format == "msgpack" and preferred:
            raise UsageError(
                f"'{folder}' holds {preferred[0].name}, which would be loaded instead of flax_model.msgpack: save to "
                "another folder, or save msgpack first and safetensors after it."
            )
        params = self.params if params is None else params
        if (flat := gathered(flatten(params))) is None:
            return
        refuse_misfits(flat, self.params_shape_tree, name=type(self).__name__)
        config, flat = without_padding(self.config, flat, self._table)
        tensors = tensors_to_write(flat, self._table, save_format)
        if save_format == "safetensors":
            save_safetensors(folder, tensors, max_shard_size=max_shard_size)
        else:
            save_msgpack(folder, dict(tensors), max_shard_size=max_shard_size)
        config.architectures = [type(self).__name__.removeprefix("Flax")]
        trained = flatten(params["params"] if self._statistics else params)
        config.dtype = next((leaf.dtype.name for leaf in trained.values() if is_floating(leaf)), None)
        config.save_pretrained(folder)
        if push_to_hub:
            self.push_to_hub(repo_id or folder.name, folder=folder, token=token)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        folder=None,
        params: Tree | None = None,
        token: str | None = None,
        private: bool | None = None,
        commit_message: str = "Upload model",
    ) -> str:
        """Publish the model as `repo_id` and return its address; a `folder` that was saved before is pushed whole."""
        if folder is not None:
            return push_folder(folder, repo_id, token=token, private=private, commit_message=commit_message)
        with tempfile.TemporaryDirectory() as temporary:
            self.save_pretrained(temporary, params)
            return push_folder(temporary, repo_id, token=token, private=private, commit_message=commit_message)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: everything but compiled programs."""
        return {name: value for name, value in vars(self).items() if name not in ("_jitted", "_programs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` kept."""
        vars(self).update(state)
        self._jitted = jitted_apply(self.module, self._statistics)

    # Inside.

    def _make_module(self, **fields: Any) -> nn.Module:
        known = {field.name for field in dataclasses.fields(self.module_class)} - {"parent", "name"}
        unknown = sorted(fields.keys() - known)
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {listed(sorted(known))}."
            raise UsageError(f"{type(self).__name__} has no setting '{unknown[0]}': {hint}")
        if "param_dtype" in known:
            fields["param_dtype"] = self.param_dtype
        return self.module_class(config=self.config, dtype=self.dtype, **fields)

    @property
    def _table(self) -> dict[str, Leaf]:
        rows = self.rows(self.module) or generic_rows(self.params_shape_tree)
        return leaves(rows, scan_layers=getattr(self.module, "scan_layers", False))

    def _shapes(self) -> Tree:
        """Return the parameters' shapes and dtypes.

        A family is traced with scanned layers whatever the model does: one layer instead of all of them.
        """
        rows, scanned = self.rows(self.module), getattr(self.module, "scan_layers", None)
        module = self.module.clone(scan_layers=True) if rows and scanned is not None else self.module

        def init():
            # Traced with its key and inputs: nothing is compiled to learn shapes.
            return module.init({"params": jax.random.key(0)}, **self.dummy_inputs(self.input_shape))  # type: ignore

        shapes = held(jax.eval_shape(init), lambda params: cast_shapes(params, self.param_dtype))
        if not rows:
            return shapes
        return unflatten(shapes_by_rows(flatten(shapes), rows, scan_layers=bool(scanned), name=type(self).__name__))

    @classmethod
    def _is_base(cls) -> bool:
        return cls.__name__.endswith("Model") and not cls.__name__.endswith("LMHeadModel")
