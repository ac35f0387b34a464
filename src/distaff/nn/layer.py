"""One Transformer layer, and what a stack hands to it and takes from it."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.mesh import constrain
from distaff.nn.attention import Attention
from distaff.nn.cache import LayerCache
from distaff.nn.dropout import Dropout
from distaff.nn.mask import Sight
from distaff.nn.mlp import MLP
from distaff.nn.norm import Norm, norm_of


class LayerInputs(NamedTuple):
    """What all layers of a stack share.

    sight: what self-attention sees, all by default. source: the encoder's states `[batch, source length, embed]`.
    source_sight: what is seen of them. start: the first free slot of the cache, a scalar.
    """

    sight: Sight | None = None
    source: jax.Array | None = None
    source_sight: Sight | None = None
    start: jax.Array | None = None


class LayerOwn(NamedTuple):
    """What one layer has for itself: its number, a scalar, and its cache."""

    number: jax.Array | int
    cache: LayerCache | None = None


class LayerOutputs(NamedTuple):
    """What a layer returns beside its hidden states: attention weights, and its cache."""

    weights: jax.Array | None = None
    source_weights: jax.Array | None = None
    cache: LayerCache | None = None


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each with dropout, a residual and a norm after ("post") or before it ("pre").

    With `cross_attention` the layer attends to the encoder's states between the two. `attention_fields` and
    `mlp_fields` are further fields of `Attention` and `MLP`, `attn_implementation` how all attend (`nn/attend.py`).
    """

    attention_class: ClassVar[type[Attention]] = Attention

    num_heads: int
    intermediate_size: int
    activation: str
    norm_eps: float
    norm_order: Literal["pre", "post"]
    dropout_rate: float
    attention_dropout_rate: float
    initializer_range: float
    norm: Norm = "layer"
    cross_attention: bool = False
    attention_fields: Mapping[str, Any] | None = None
    mlp_fields: Mapping[str, Any] | None = None
    attn_implementation: str = "auto"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def attention_scale(self, number: jax.Array | int) -> jax.Array | float | None:
        """Return the factor on the scores of layer `number`, None for the usual one; a family may say otherwise."""
        return None

    def own_sight(self, shared: LayerInputs, number: jax.Array | int) -> Sight | None:
        """Return what self-attention of layer `number` sees, the same in all layers; a family may say otherwise."""
        return shared.sight

    @nn.compact
    def __call__(
        self, hidden: jax.Array, shared: LayerInputs, own: LayerOwn, deterministic: bool
    ) -> tuple[jax.Array, LayerOutputs]:
        """Return `[batch, length, embed]` and the rest."""
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        pre = self.norm_order == "pre"

        def norm(name: str) -> nn.Module:
            return norm_of(self.norm, eps=self.norm_eps, **dtypes, name=name)

        def enter(norm: nn.Module) -> jax.Array:
            return norm(hidden) if pre else hidden

        def leave(norm: nn.Module, inner: jax.Array) -> jax.Array:
            total = hidden + Dropout(self.dropout_rate)(inner, deterministic=deterministic)
            return constrain(total if pre else norm(total), "batch", None, None)

        def attention(name: str) -> Attention:
            fields = {"dropout_rate": self.attention_dropout_rate, **dtypes, **(self.attention_fields or {})}
            fields["implementation"] = self.attn_implementation
            return self.attention_class(self.num_heads, initializer_range=self.initializer_range, name=name, **fields)

        own_norm = norm("attention_norm")
        attended = attention("attention")(
            enter(own_norm),
            self.own_sight(shared, own.number),
            deterministic=deterministic,
            kept=own.cache.own if own.cache else None,
            start=shared.start,
            scale=self.attention_scale(own.number),
        )
        hidden = leave(own_norm, attended.hidden)
        source_attended = None
        if self.cross_attention:
            source_norm = norm("cross_attention_norm")
            source_attended = attention("cross_attention")(
                enter(source_norm),
                shared.source_sight,
                deterministic=deterministic,
                source=shared.source,
                kept=own.cache.source if own.cache else None,
            )
            hidden = leave(source_norm, source_attended.hidden)
        mlp = MLP(
            self.intermediate_size,
            self.activation,
            self.initializer_range,
            **(self.mlp_fields or {}),
            **dtypes,
            name="mlp",
        )
        mlp_norm = norm("mlp_norm")
        hidden = leave(mlp_norm, mlp(enter(mlp_norm), deterministic=deterministic))
        weights, used = (source_attended.weights, source_attended.used) if source_attended else (None, None)
        cache = LayerCache(attended.used, used) if own.cache else None
        return hidden, LayerOutputs(attended.weights, weights, cache)
