"""ViT (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929)."""

import copy
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from transformers import ViTConfig

from distaff.core.errors import ConfigError, DataError
from distaff.core.tree import flatten, unflatten
from distaff.models._encoder_heads import new_linear
from distaff.models._family import check_activation, check_fields, check_heads
from distaff.models._outputs import FlaxBaseModelOutputWithPooling, FlaxSequenceClassifierOutput
from distaff.models._vision import FlaxVisionModel, check_pixels, check_positive, pair_of
from distaff.nn.act import ACTIVATIONS
from distaff.nn.dropout import Dropout
from distaff.nn.heads import first_token
from distaff.nn.layer import LayerInputs, TransformerLayer
from distaff.nn.norm import LayerNorm
from distaff.nn.patches import PatchEmbedding, resized_positions
from distaff.nn.stack import Stack
from distaff.weights import Row, conv, linear, norm, prefixed, repeated

# What the config means.

CONSUMED = frozenset(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob initializer_range layer_norm_eps image_size patch_size num_channels qkv_bias "
    "pooler_output_size pooler_act".split()
)
ALLOWED: dict[str, tuple[Any, ...]] = {"head_dim": (None,), "is_encoder_decoder": (False,)}
# Of the head for masked image modeling.
WITHOUT_EFFECT = ["encoder_stride"]


def check_vit_config(config) -> None:
    """Raise `ConfigError` for what is not implemented."""
    check_fields(config, consumed=CONSUMED, allowed=ALLOWED, without_effect=WITHOUT_EFFECT)
    check_activation(config.hidden_act)
    check_activation(config.pooler_act, "pooler_act")
    check_heads(config.hidden_size, config.num_attention_heads)
    sizes = ("image_size", "patch_size", "num_channels", "pooler_output_size")
    check_positive(**{name: getattr(config, name) for name in sizes})
    if 0 in grid_of(config, *pair_of(config.image_size)):
        raise ConfigError(f"image_size={config.image_size!r} holds no patch of patch_size={config.patch_size!r}.")


def grid_of(config, height: int, width: int) -> tuple[int, int]:
    """Return how many rows and columns of patches an image has."""
    tall, wide = pair_of(config.patch_size)
    return height // tall, width // wide


# The model.


class ViTEmbeddings(nn.Module):
    """A class token and the patches, each with a position."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, pixel_values: jax.Array, *, interpolate: bool, deterministic: bool) -> jax.Array:
        """Return `[batch, 1 + patches, embed]` for `[batch, channels, height, width]`."""
        config = self.config
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        size = pixel_values.shape[2:]
        own, grid = grid_of(config, *pair_of(config.image_size)), grid_of(config, *size)
        if not interpolate and size != pair_of(config.image_size):
            raise DataError(
                f"Images of {size[0]} x {size[1]} pixels are not of the model's image_size {config.image_size}: let "
                "the image processor resize them, or pass interpolate_pos_encoding=True."
            )
        if 0 in grid:
            raise DataError(f"Images of {size[0]} x {size[1]} pixels hold no patch of patch_size {config.patch_size}.")
        init = nn.initializers.normal(config.initializer_range)
        features = config.hidden_size
        projection = PatchEmbedding(
            features, pair_of(config.patch_size), config.initializer_range, **dtypes, name="projection"
        )
        patches = projection(pixel_values)
        token = self.param("cls_token", init, (1, 1, features), self.param_dtype).astype(self.dtype)
        table = self.param("position_embeddings", init, (1, 1 + own[0] * own[1], features), self.param_dtype)
        # PyTorch takes the trained grid for square whatever image_size is; here it is what image_size says.
        positions = jnp.concatenate([table[0, :1], resized_positions(table[0, 1:], own, grid)]).astype(self.dtype)
        token = jnp.broadcast_to(token, (len(patches), 1, features))
        hidden = jnp.concatenate([token, patches], axis=1) + positions[None]
        return Dropout(config.hidden_dropout_prob)(hidden, deterministic=deterministic)


class ViTModule(nn.Module):
    """Embeddings, a stack of pre-norm layers, a norm, and a pooler on the class token."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    add_pooling_layer: bool = True
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    def layer_fields(self) -> dict[str, Any]:
        """Return the fields of a layer."""
        config = self.config
        return {
            "num_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "activation": config.hidden_act,
            "norm_eps": config.layer_norm_eps,
            "norm_order": "pre",
            "dropout_rate": config.hidden_dropout_prob,
            "attention_dropout_rate": config.attention_probs_dropout_prob,
            "initializer_range": config.initializer_range,
            "attention_fields": {"use_bias": config.qkv_bias},
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }

    @nn.compact
    def __call__(
        self,
        pixel_values: jax.Array,
        *,
        interpolate_pos_encoding: bool = False,
        deterministic: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> FlaxBaseModelOutputWithPooling:
        """Encode `pixel_values` `[batch, channels, height, width]`; other sizes than the config's are interpolated."""
        config = self.config
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        check_pixels(pixel_values, config.num_channels)
        hidden = ViTEmbeddings(config, **dtypes, name="embeddings")(
            pixel_values, interpolate=interpolate_pos_encoding, deterministic=deterministic
        )
        encoder = Stack(
            TransformerLayer,
            self.layer_fields(),
            config.num_hidden_layers,
            remat=self.gradient_checkpointing,
            scan=self.scan_layers,
            attn_implementation=self.attn_implementation,
            name="encoder",
        )
        outputs = encoder(
            hidden,
            LayerInputs(),
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        last = LayerNorm(eps=config.layer_norm_eps, **dtypes, name="norm")(outputs.last)
        pooled = None
        if self.add_pooling_layer:
            init = nn.initializers.normal(config.initializer_range)
            dense = nn.Dense(config.pooler_output_size, kernel_init=init, **dtypes, name="pooler")
            pooled = ACTIVATIONS[config.pooler_act](dense(first_token(last)))
        return FlaxBaseModelOutputWithPooling(last, pooled, outputs.hidden_states, outputs.attentions)


# Heads.


class ViTForImageClassificationModule(nn.Module):
    """A dense layer on the class token."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    add_pooling_layer: ClassVar[bool] = False

    @nn.compact
    def __call__(self, pixel_values: jax.Array, **options: Any) -> FlaxSequenceClassifierOutput:
        """Return `[batch, num_labels]` for `pixel_values` `[batch, channels, height, width]`."""
        base = ViTModule(
            self.config,
            self.dtype,
            self.param_dtype,
            self.add_pooling_layer,
            self.gradient_checkpointing,
            self.scan_layers,
            self.attn_implementation,
            name="vit",
        )
        outputs = base(pixel_values, **options)
        classifier = nn.Dense(
            self.config.num_labels,
            kernel_init=nn.initializers.normal(self.config.initializer_range),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name="classifier",
        )
        assert outputs.last_hidden_state is not None
        logits = classifier(first_token(outputs.last_hidden_state))
        return FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


# Rows.


# Parts of a layer in PyTorch's files, and in what `state_dict()` gives today, which `torch.save` keeps.
IN_MEMORY = {
    "encoder.layer.{i}.": "layers.{i}.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def in_memory(row: Row) -> Row:
    """Return the row of a layer with its name in memory as an alias."""
    name = row.key
    for saved, ours in IN_MEMORY.items():
        name = name.replace(saved, ours)
    return replace(row, aliases=(name,))


def vit_rows(config, *, pooler: bool = True) -> list[Row]:
    """Rows of the base model."""
    layer, ours = "encoder.layer.{i}", "encoder/{i}"
    attention = f"{layer}.attention.attention"
    inner = {"bias": config.qkv_bias}
    rows = [
        Row("embeddings.cls_token", "embeddings/cls_token", "raw", (None, None, "embed")),
        Row("embeddings.position_embeddings", "embeddings/position_embeddings", "raw", (None, None, "embed")),
        *conv("embeddings.patch_embeddings.projection", "embeddings/projection", (None, None, None, "embed")),
        *repeated(
            config.num_hidden_layers,
            map(
                in_memory,
                [
                    *linear(f"{attention}.query", f"{ours}/attention/query", ("embed", "heads"), **inner),
                    *linear(f"{attention}.key", f"{ours}/attention/key", ("embed", "heads"), **inner),
                    *linear(f"{attention}.value", f"{ours}/attention/value", ("embed", "heads"), **inner),
                    *linear(f"{layer}.attention.output.dense", f"{ours}/attention/out", ("heads", "embed")),
                    *norm(f"{layer}.layernorm_before", f"{ours}/attention_norm"),
                    *linear(f"{layer}.intermediate.dense", f"{ours}/mlp/up", ("embed", "mlp")),
                    *linear(f"{layer}.output.dense", f"{ours}/mlp/down", ("mlp", "embed")),
                    *norm(f"{layer}.layernorm_after", f"{ours}/mlp_norm"),
                ],
            ),
        ),
        *norm("layernorm", "norm"),
    ]
    if pooler:
        rows += linear("pooler.dense", "pooler", ("embed", None), required=False)
    return rows


# Public names.


class FlaxViTPreTrainedModel(FlaxVisionModel):
    """What the ViT classes share."""

    config_class: ClassVar[Any] = ViTConfig
    base_model_prefix = "vit"
    # Of a checkpoint that was pretrained by masked image modeling.
    ignored_keys = (r"(^|[./])embeddings[./]mask_token$",)

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_vit_config(config)

    @classmethod
    def base_rows(cls, config, *, pooler: bool = True) -> list[Row]:
        """Rows of the whole base model, without its prefix."""
        return vit_rows(config, pooler=pooler)

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of all parameters of `module`."""
        base = cls.base_rows(module.config, pooler=module.add_pooling_layer)
        return base if cls._is_base() else [*prefixed(cls.base_model_prefix, base), *new_linear("classifier")]

    def resize_positions(self, size: int | tuple[int, int]) -> None:
        """Let the model take images of `size` (one side or height and width), which its config then says.

        New positions lie between the trained ones, as with `interpolate_pos_encoding`, and are parameters like them.
        """
        height, width = pair_of(size)
        config = copy.deepcopy(self.config)
        config.image_size = height if height == width else [height, width]
        options: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype, "mesh": self.mesh}
        resized = type(self)(config, self.module.clone(config=config), seed=self.seed, _do_init=False, **options)
        grids = [grid_of(each, *pair_of(each.image_size)) for each in (self.config, config)]
        flat = flatten(self.params)
        path = next(path for path in flat if path.endswith("embeddings/position_embeddings"))
        token, table = flat[path][0, :1], flat[path][0, 1:]
        positions = jnp.concatenate([token, resized_positions(table, *grids)])[None]
        sharding = self._sharding(self._table[path], positions.shape)
        resized.params = unflatten({**flat, path: jax.device_put(positions, sharding)})
        resized.loading_report = self.loading_report
        vars(self).update(vars(resized))

    def __call__(  # type: ignore[override]
        self,
        pixel_values,
        *,
        interpolate_pos_encoding: bool = False,
        params=None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """Return the head's output for `pixel_values` `[batch, channels, height, width]`.

        With `interpolate_pos_encoding`, images of other sizes than the config's get positions between the trained ones.
        `output_*` and `return_dict` default to the config's. Raises `DataError` for pixels that do not fit.
        """
        return self.answer(
            {"pixel_values": pixel_values},
            states={"output_attentions": output_attentions, "output_hidden_states": output_hidden_states},
            return_dict=return_dict,
            params=params,
            dropout_rng=dropout_rng,
            train=train,
            interpolate_pos_encoding=bool(interpolate_pos_encoding),
        )


class FlaxViTModel(FlaxViTPreTrainedModel):
    """The encoder: hidden states, and the pooled class token."""

    module_class = ViTModule


class FlaxViTForImageClassification(FlaxViTPreTrainedModel):
    """Classification of images."""

    module_class = ViTForImageClassificationModule
