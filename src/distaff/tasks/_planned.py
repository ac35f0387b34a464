"""A training step as shapes: what `distaff fit` compiles, for which no data, tokenizer or parameters are needed.

Each recipe has a `plan(flags, mesh)`; its batch is what its own collation makes of rows of the greatest length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from jax.sharding import Mesh
from tokenizers import Tokenizer, models, pre_tokenizers

from distaff.core.tree import Tree, flatten, unflatten
from distaff.data.batches import Collate
from distaff.tasks import _recipe as recipes
from distaff.train import make_optimizer
from distaff.train.footprint import Footprint, footprint
from distaff.weights import STATISTICS

# As many as T5's tokenizers have.
_SENTINELS = 100
# Rows that are made to see what a collation makes of them.
_MADE = 2


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A step of a recipe.

    model: without parameters. loss_fn: as `train.fit` wants it. batch: shapes and dtypes of the rows of a whole step.
    scored: positions a row whose logits over the vocabulary are computed. trained: as `make_optimizer` wants it.
    """

    model: Any
    loss_fn: Callable[..., Any]
    batch: dict[str, jax.ShapeDtypeStruct]
    scored: int = 0
    trained: Tree | None = None

    @property
    def rows(self) -> int:
        """The rows of a step."""
        return next(iter(self.batch.values())).shape[0]

    def measure(self, flags: Any, mesh: Mesh, *, limit: int | None = None) -> Footprint:
        """Return what a step needs on each device of `mesh`, which has `limit` bytes."""
        params, carried = parts(self.model.params_shape_tree)
        shardings, _ = parts(unflatten(self.model.param_shardings(mesh)))
        masks = {"decay_mask": self.model.decay_mask(), "matrices": self.model.matrices()}
        # The schedule is a few numbers, whatever its length is.
        steps = max(flags.max_steps, flags.warmup_steps + 1)
        tx, schedule = make_optimizer(
            flags.optimizer_config(),
            total_steps=steps,
            trained=self.trained,
            **{name: parts(mask)[0] for name, mask in masks.items()},
        )
        return footprint(
            self.loss_fn,
            params=params,
            shardings=shardings,
            carried=carried,
            tx=tx,
            schedule=schedule,
            batch=self.batch,
            mesh=mesh,
            accumulation=flags.gradient_accumulation_steps,
            ema_decay=flags.ema_decay,
            limit=limit,
        )


def parts(tree: Tree) -> tuple[Tree, Tree]:
    """Return the parameters of a model's tree, and its statistics under their name, None where it has none."""
    return (tree["params"], {STATISTICS: tree[STATISTICS]}) if STATISTICS in tree else (tree, None)


def model_of(auto_class: Any, flags: Any, mesh: Mesh, tokenizer: Any = None) -> Any:
    """Return the model of `auto_class` that the flags name, without parameters."""
    config = recipes.load_config(flags, tokenizer, flags.hub_token)
    recipes.check_vocabulary(tokenizer, config)
    with recipes.shapes_only(mesh):
        return recipes.load_model(auto_class, flags, config, seed=flags.seed)


def text_model(auto_class: Any, flags: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Return the model, and the tokenizer that --tokenizer_name names or one that stands for it."""
    flags.check_training()
    named = recipes.load_tokenizer(flags, flags.hub_token) if flags.tokenizer_name else None
    model = model_of(auto_class, flags, mesh, named)
    return model, stand_in(model.config) if named is None else named


def stand_in(config: Any) -> Any:
    """Return a tokenizer for rows that nobody reads: every special token, T5's sentinels, and a word."""
    from transformers import PreTrainedTokenizerFast

    special = {
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "<cls>",
        "sep_token": "<sep>",
        "mask_token": "<mask>",
    }
    tokens = [*special.values(), *(f"<extra_id_{number}>" for number in range(_SENTINELS)), "word"]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    types = ["token_type_ids"] if getattr(config, "type_vocab_size", 1) > 1 else []
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", *types, "attention_mask"], **special
    )


def rows_of(tokenizer: Any, **lengths: int) -> pa.Table:
    """Return rows whose columns are lists of ids, each of its length."""
    special = set(tokenizer.all_special_ids)
    word = next(number for number in range(len(tokenizer)) if number not in special)
    columns = {name: [[word] * length] * _MADE for name, length in lengths.items()}
    return pa.table({name: pa.array(lists, pa.list_(pa.int32())) for name, lists in columns.items()})


def with_values(rows: pa.Table, **values: Any) -> pa.Table:
    """Return `rows` with further columns, which have the same value in each row."""
    for name, value in values.items():
        rows = rows.append_column(name, pa.array(np.full(_MADE, value)))
    return rows


def batch_of(
    collate: Collate, rows: pa.Table, *, count: int, length: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a batch of `count` rows like `rows`."""
    made = collate(rows, indices=np.arange(_MADE), weights=np.ones(_MADE, np.float32), epoch=1, length=length)
    return {name: jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype) for name, array in made.items()}


def count_parameters(model: Any) -> int:
    """Return how many numbers are trained, padding of the vocabulary included."""
    return sum(int(np.prod(leaf.shape)) for leaf in flatten(parts(model.params_shape_tree)[0]).values())
