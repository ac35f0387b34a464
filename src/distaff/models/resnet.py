"""ResNet (He et al. 2015, https://arxiv.org/abs/1512.03385), version 1.5 unless the config downsamples first."""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from transformers import ResNetConfig

from distaff.core.errors import ConfigError
from distaff.core.mesh import constrain
from distaff.models._family import check_activation, check_fields
from distaff.models._outputs import (
    FlaxBaseModelOutputWithPoolingAndNoAttention,
    FlaxImageClassifierOutputWithNoAttention,
)
from distaff.models._vision import FlaxVisionModel, check_pixels, check_positive
from distaff.nn.act import ACTIVATIONS
from distaff.nn.norm import BatchNorm
from distaff.nn.stack import checkpointed
from distaff.weights import Row, batch_norm, conv, in_collections, linear, prefixed

# What the config means.

CONSUMED = frozenset(
    "num_channels embedding_size hidden_sizes depths hidden_act downsample_in_first_stage "
    "downsample_in_bottleneck".split()
)
# Of the backbone class, which returns some stages.
WITHOUT_EFFECT = "stage_names out_features out_indices layer_types".split()
LAYER_TYPES = ("basic", "bottleneck")
# By how much a bottleneck is narrower than what goes in and out; no config says it.
REDUCTION = 4


def check_resnet_config(config) -> None:
    """Raise `ConfigError` for what is not implemented."""
    allowed: dict[str, tuple[Any, ...]] = {"layer_type": LAYER_TYPES, "is_encoder_decoder": (False,)}
    check_fields(config, consumed=CONSUMED, allowed=allowed, without_effect=WITHOUT_EFFECT)
    check_activation(config.hidden_act)
    sizes = ("num_channels", "embedding_size", "hidden_sizes", "depths")
    check_positive(**{name: getattr(config, name) for name in sizes})
    if len(config.hidden_sizes) != len(config.depths) or not config.depths:
        raise ConfigError(
            f"hidden_sizes={config.hidden_sizes!r} and depths={config.depths!r} must name the same stages, one or more."
        )
    if config.layer_type == "bottleneck" and min(config.hidden_sizes) < REDUCTION:
        raise ConfigError(f"hidden_sizes={config.hidden_sizes!r} of bottleneck layers must be at least {REDUCTION}.")


class Convolution(NamedTuple):
    """A convolution: the sides of its square window, its stride and how many channels it gives."""

    window: int
    stride: int
    channels: int


class Layer(NamedTuple):
    """A residual layer: its convolutions, and the one on its shortcut where what goes in has another shape."""

    convolutions: tuple[Convolution, ...]
    shortcut: Convolution | None


def stages(config) -> list[list[Layer]]:
    """Return the layers of each stage, as the config says them."""
    entering, found = config.embedding_size, []
    for stage, (channels, depth) in enumerate(zip(config.hidden_sizes, config.depths)):
        layers = []
        for index in range(depth):
            shrinks = index == 0 and (stage > 0 or config.downsample_in_first_stage)
            layers.append(_layer(config, entering, channels, 2 if shrinks else 1))
            entering = channels
        found.append(layers)
    return found


def _layer(config, entering: int, channels: int, stride: int) -> Layer:
    shortcut = Convolution(1, stride, channels) if entering != channels or stride != 1 else None
    if config.layer_type == "basic":
        return Layer((Convolution(3, stride, channels), Convolution(3, 1, channels)), shortcut)
    narrow, first = max(channels // REDUCTION, 1), stride if config.downsample_in_bottleneck else 1
    inner = (Convolution(1, first, narrow), Convolution(3, stride // first, narrow), Convolution(1, 1, channels))
    return Layer(inner, shortcut)


def stem(config) -> Convolution:
    """Return the convolution on the pixels."""
    return Convolution(7, 2, config.embedding_size)


# The model. Inside, channels are last, where Flax's convolutions have them.


class ConvNorm(nn.Module):
    """A convolution without bias, a BatchNorm and an activation, "linear" for none."""

    convolution: Convolution
    activation: str
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, row_mask: jax.Array | None, deterministic: bool) -> jax.Array:
        """Map `[batch, height, width, channels]`, the sides divided by the stride."""
        window, stride, channels = self.convolution
        hidden = nn.Conv(
            channels,
            (window, window),
            strides=stride,
            padding=window // 2,
            use_bias=False,
            kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            conv_general_dilated=_on_whole_channels,
            name="conv",
        )(hidden)
        norm = BatchNorm(dtype=self.dtype, param_dtype=self.param_dtype, name="norm")
        return ACTIVATIONS[self.activation](norm(hidden, row_mask, deterministic=deterministic))


def _on_whole_channels(values: jax.Array, kernel: jax.Array, *settings: Any, **options: Any) -> jax.Array:
    """Convolve with a kernel `[*window, in, out]` that is not split by what goes in.

    Split by both, XLA (jaxlib 0.10.2) computes wrong gradients, and says nothing.
    """
    kernel = constrain(kernel, None, None, None, "mlp")
    return constrain(lax.conv_general_dilated(values, kernel, *settings, **options), "batch", None, None, "mlp")


class ResNetLayer(nn.Module):
    """Convolutions and a residual; the activation inside is ReLU, whatever the config says of the one at the end."""

    layer: Layer
    activation: str
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, row_mask: jax.Array | None, deterministic: bool) -> jax.Array:
        """Map `[batch, height, width, channels]`."""
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        inner, last = hidden, len(self.layer.convolutions) - 1
        for index, convolution in enumerate(self.layer.convolutions):
            activation = "linear" if index == last else "relu"
            inner = ConvNorm(convolution, activation, **dtypes, name=str(index))(inner, row_mask, deterministic)
        if self.layer.shortcut is not None:
            shortcut = ConvNorm(self.layer.shortcut, "linear", **dtypes, name="shortcut")
            hidden = shortcut(hidden, row_mask, deterministic)
        return constrain(ACTIVATIONS[self.activation](inner + hidden), "batch", None, None, None)


class ResNetStage(nn.Module):
    """Residual layers, each computed again in the backward pass with `remat`."""

    layers: tuple[Layer, ...]
    activation: str
    remat: bool | str
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, row_mask: jax.Array | None, deterministic: bool) -> jax.Array:
        """Map `[batch, height, width, channels]`."""
        body = checkpointed(ResNetLayer, self.remat, static_argnums=(3,))
        for index, layer in enumerate(self.layers):
            block = body(layer, self.activation, self.dtype, self.param_dtype, name=str(index))
            hidden = block(hidden, row_mask, deterministic)
        return hidden


class ResNetModule(nn.Module):
    """A stem, stages of residual layers, and the mean over all places."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False

    @nn.compact
    def __call__(
        self,
        pixel_values: jax.Array,
        row_mask: jax.Array | None = None,
        *,
        deterministic: bool = True,
        output_hidden_states: bool = False,
    ) -> FlaxBaseModelOutputWithPoolingAndNoAttention:
        """Encode `pixel_values` `[batch, channels, height, width]`.

        Images whose `row_mask` `[batch]` is zero, those that only fill a batch, have no part in its statistics.
        """
        config = self.config
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        check_pixels(pixel_values, config.num_channels)
        hidden = pixel_values.astype(self.dtype).transpose(0, 2, 3, 1)  # [batch, height, width, channels]
        hidden = ConvNorm(stem(config), config.hidden_act, **dtypes, name="stem")(hidden, row_mask, deterministic)
        hidden = nn.max_pool(hidden, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        states = [hidden]
        for index, layers in enumerate(stages(config)):
            fields = (tuple(layers), config.hidden_act, self.gradient_checkpointing)
            hidden = ResNetStage(*fields, **dtypes, name=f"stage_{index}")(hidden, row_mask, deterministic)
            states.append(hidden)
        first = [state.transpose(0, 3, 1, 2) for state in (states if output_hidden_states else states[-1:])]
        pooled = first[-1].astype(jnp.float32).mean((2, 3), keepdims=True).astype(self.dtype)
        return FlaxBaseModelOutputWithPoolingAndNoAttention(
            first[-1], pooled, tuple(first) if output_hidden_states else None
        )


# Heads.


class ResNetForImageClassificationModule(nn.Module):
    """A dense layer on the mean over all places."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False

    @nn.compact
    def __call__(
        self, pixel_values: jax.Array, row_mask: jax.Array | None = None, **options: Any
    ) -> FlaxImageClassifierOutputWithNoAttention:
        """Return `[batch, num_labels]` for `pixel_values` `[batch, channels, height, width]`."""
        fields = (self.config, self.dtype, self.param_dtype, self.gradient_checkpointing)
        outputs = ResNetModule(*fields, name="resnet")(pixel_values, row_mask, **options)
        classifier = nn.Dense(self.config.num_labels, dtype=self.dtype, param_dtype=self.param_dtype, name="classifier")
        assert outputs.pooler_output is not None
        logits = classifier(outputs.pooler_output[:, :, 0, 0])
        return FlaxImageClassifierOutputWithNoAttention(logits, outputs.hidden_states)


# Rows.


def resnet_rows(config) -> list[Row]:
    """Rows of the base model."""
    rows = _conv_norm_rows("embedder.embedder", "stem", stem(config))
    for stage, layers in enumerate(stages(config)):
        for index, layer in enumerate(layers):
            theirs, ours = f"encoder.stages.{stage}.layers.{index}", f"stage_{stage}/{index}"
            for number, convolution in enumerate(layer.convolutions):
                # Old Flax named the parts of its basic layer otherwise.
                old = f"{theirs}.layer.layer_{number}" if config.layer_type == "basic" else None
                rows += _conv_norm_rows(f"{theirs}.layer.{number}", f"{ours}/{number}", convolution, old=old)
            if layer.shortcut is not None:
                rows += _conv_norm_rows(f"{theirs}.shortcut", f"{ours}/shortcut", layer.shortcut)
    return rows


def _conv_norm_rows(key: str, path: str, convolution: Convolution, *, old: str | None = None) -> list[Row]:
    # The deviation of He et al. 2015 (https://arxiv.org/abs/1502.01852), counted from what goes out.
    deviation = (2.0 / (convolution.channels * convolution.window**2)) ** 0.5
    rows = [
        *conv(f"{key}.convolution", f"{path}/conv", (None, None, "embed", "mlp"), bias=False, std=deviation),
        *batch_norm(f"{key}.normalization", f"{path}/norm"),
    ]
    return [replace(row, flax_name=row.key.replace(key, old)) for row in rows] if old else rows


# Public names.


class FlaxResNetPreTrainedModel(FlaxVisionModel):
    """What the ResNet classes share.

    `params` is `{"params": ..., "batch_stats": ...}`: the parameters that are trained, and the running statistics of
    the BatchNorms.
    """

    config_class: ClassVar[Any] = ResNetConfig
    base_model_prefix = "resnet"
    draws_dropout = False

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_resnet_config(config)

    @classmethod
    def base_rows(cls, config) -> list[Row]:
        """Rows of the whole base model, without its prefix."""
        return resnet_rows(config)

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of all parameters of `module`."""
        base = cls.base_rows(module.config)
        if cls._is_base():
            return in_collections(base)
        # The deviation of PyTorch's dense layers.
        deviation = (3.0 * module.config.hidden_sizes[-1]) ** -0.5
        head = linear("classifier.1", "classifier", ("embed", None), required=False, std=deviation)
        return in_collections([*prefixed(cls.base_model_prefix, base), *head])

    def __call__(  # type: ignore[override]
        self,
        pixel_values,
        row_mask=None,
        *,
        params=None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """Return the head's output for `pixel_values` `[batch, channels, height, width]`.

        With `train`, batches are normalised by their own statistics, those of images whose `row_mask` `[batch]` is not
        zero, and the answer is `(outputs, {"batch_stats": the new running statistics})`; the model keeps its own. On
        many devices under `jit` they are those of the whole batch. `output_hidden_states` and `return_dict` default to
        the config's. A ResNet draws no dropout.
        """
        return self.answer(
            {"pixel_values": pixel_values, "row_mask": row_mask},
            states={"output_hidden_states": output_hidden_states},
            return_dict=return_dict,
            params=params,
            dropout_rng=dropout_rng,
            train=train,
        )


class FlaxResNetModel(FlaxResNetPreTrainedModel):
    """The stages: the last one's output, and its mean over all places."""

    module_class = ResNetModule


class FlaxResNetForImageClassification(FlaxResNetPreTrainedModel):
    """Classification of images."""

    module_class = ResNetForImageClassificationModule
