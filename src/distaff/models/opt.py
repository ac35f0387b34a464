"""OPT (Zhang et al. 2022, https://arxiv.org/abs/2205.01068)."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from transformers import OPTConfig

from distaff.models import _causal as causal
from distaff.models._causal import FlaxCausalModel, causal_sight, next_positions, run_layers
from distaff.models._family import check_activation, check_fields, check_heads
from distaff.models._outputs import FlaxBaseModelOutputWithPast
from distaff.nn.cache import Cache
from distaff.nn.embed import embedding as embedding_table
from distaff.nn.layer import TransformerLayer
from distaff.nn.mask import causal_mask
from distaff.nn.norm import LayerNorm
from distaff.nn.stack import Stack
from distaff.resizing import vocab_rows
from distaff.weights import Row, embedding, linear, norm, repeated

# What the config means.

CONSUMED = frozenset(
    "vocab_size hidden_size num_hidden_layers ffn_dim max_position_embeddings do_layer_norm_before "
    "_remove_final_layer_norm word_embed_proj_dim dropout attention_dropout num_attention_heads activation_function "
    "layerdrop init_std enable_bias tie_word_embeddings".split()
)
ALLOWED: dict[str, tuple[Any, ...]] = {
    "layer_norm_elementwise_affine": (True,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
}
# activation_dropout stands in files of the first versions, and no version of PyTorch's OPT applied it.
WITHOUT_EFFECT = ["pad_token_id", "is_decoder", "activation_dropout"]

# The config has no epsilon: PyTorch's OPT takes the default of torch.nn.LayerNorm, as metaseq, its origin, did.
NORM_EPS = 1e-5
# Rows of the position table before that of the first token (fairseq counted from padding_idx + 1 = 2); a padded token
# has the last of them.
POSITION_OFFSET = 2


def has_final_norm(config) -> bool:
    """Tell whether a norm follows the last layer: where norms stand before, unless an old checkpoint says otherwise."""
    return config.do_layer_norm_before and not config._remove_final_layer_norm


def is_projected(config) -> bool:
    """Tell whether words are embedded in another width than that of the layers."""
    return config.word_embed_proj_dim != config.hidden_size


# The model.


def positions_of(input_ids: jax.Array, attention_mask: jax.Array | None, cache: Cache | None) -> jax.Array:
    """Return `[batch, length]`: how many attended tokens stand before each of `input_ids`, -1 for padding.

    `attention_mask` is `[batch, keys]`, or `[batch, queries, keys]` where queries differ; keys are the slots of `cache`
    where there is one.
    """
    if attention_mask is None:
        return next_positions(input_ids, cache)
    if attention_mask.ndim == 3:
        seen = attention_mask[:, None].astype(bool) & causal_mask(input_ids, cache)  # [batch, 1, length, keys]
        return jnp.sum(seen[:, 0], axis=-1, dtype=jnp.int32) - 1
    real = attention_mask.astype(bool).astype(jnp.int32)
    positions = jnp.cumsum(real, axis=1) * real - 1  # [batch, keys]
    if cache is None:
        return positions
    return lax.dynamic_slice_in_dim(positions, cache.filled, input_ids.shape[1], axis=1)


class OPTModule(nn.Module):
    """Word and position embeddings and the layers; around them projections where words are narrower."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        past_key_values: Cache | None = None,
        *,
        deterministic: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> FlaxBaseModelOutputWithPast:
        """Read `input_ids` and `position_ids` `[batch, length]`; `attention_mask` is `[batch, keys]`."""
        cache = past_key_values
        if position_ids is None:
            position_ids = positions_of(input_ids, attention_mask, cache)
        hidden = self.embed(input_ids, position_ids)
        return run_layers(
            self.stack(),
            hidden,
            causal_sight(attention_mask, cache),
            cache,
            finish=self.finish,
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )

    def finish(self, last: jax.Array) -> jax.Array:
        """Return the last state `[batch, length, word embed]` for that of the last layer."""
        config = self.config
        if has_final_norm(config):
            norm = LayerNorm(eps=NORM_EPS, dtype=self.dtype, param_dtype=self.param_dtype, name="final_layer_norm")
            last = norm(last)
        return self.projection(config.word_embed_proj_dim, "project_out")(last) if is_projected(config) else last

    def embed(self, input_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Return `[batch, length, embed]`."""
        config = self.config
        tables = {"initializer_range": config.init_std, "dtype": self.dtype, "param_dtype": self.param_dtype}
        words = embedding_table(
            vocab_rows(config), config.word_embed_proj_dim, **tables, entries="vocab", name="embed_tokens"
        )
        count = config.max_position_embeddings + POSITION_OFFSET
        positions = embedding_table(count, config.hidden_size, **tables, name="embed_positions")
        hidden = words(input_ids)
        if is_projected(config):
            hidden = self.projection(config.hidden_size, "project_in")(hidden)
        return hidden + positions(position_ids + POSITION_OFFSET)

    def projection(self, features: int, name: str) -> nn.Dense:
        """Return a linear map between the width of words and that of layers."""
        init = nn.initializers.normal(self.config.init_std)
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return nn.Dense(features, use_bias=False, kernel_init=init, **dtypes, name=name)

    def stack(self) -> Stack:
        """Return the layers."""
        config = self.config
        layer_fields = {
            "num_heads": config.num_attention_heads,
            "intermediate_size": config.ffn_dim,
            "activation": config.activation_function,
            "norm_eps": NORM_EPS,
            "norm_order": "pre" if config.do_layer_norm_before else "post",
            "dropout_rate": config.dropout,
            "attention_dropout_rate": config.attention_dropout,
            "initializer_range": config.init_std,
            "attention_fields": {"use_bias": config.enable_bias, "out_bias": config.enable_bias},
            "mlp_fields": {"use_bias": config.enable_bias},
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }
        return Stack(
            TransformerLayer,
            layer_fields,
            config.num_hidden_layers,
            remat=self.gradient_checkpointing,
            scan=self.scan_layers,
            layerdrop=config.layerdrop,
            attn_implementation=self.attn_implementation,
            name="layers",
        )


class OPTForCausalLMModule(causal.ForCausalLM):
    """`ForCausalLM` on OPT."""

    base_class = OPTModule
    base_name = "model"
    table_path = ("embed_tokens", "embedding")

    @property
    def initializer_range(self) -> float:
        """Standard deviation of random weights."""
        return self.config.init_std


# Rows.


def opt_rows(config) -> list[Row]:
    """Rows of the base model."""
    bias = config.enable_bias
    names = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    attention = "decoder.layers.{i}.self_attn"
    projections = [
        row
        for theirs, ours in names
        for row in linear(f"{attention}.{theirs}", f"layers/{{i}}/attention/{ours}", ("embed", "heads"), bias=bias)
    ]
    rows = [
        *embedding("decoder.embed_tokens", "embed_tokens", ("vocab", "embed")),
        *embedding("decoder.embed_positions", "embed_positions", (None, "embed")),
        *repeated(
            config.num_hidden_layers,
            [
                *projections,
                *linear(
                    "decoder.layers.{i}.self_attn.out_proj", "layers/{i}/attention/out", ("heads", "embed"), bias=bias
                ),
                *norm("decoder.layers.{i}.self_attn_layer_norm", "layers/{i}/attention_norm"),
                *linear("decoder.layers.{i}.fc1", "layers/{i}/mlp/up", ("embed", "mlp"), bias=bias),
                *linear("decoder.layers.{i}.fc2", "layers/{i}/mlp/down", ("mlp", "embed"), bias=bias),
                *norm("decoder.layers.{i}.final_layer_norm", "layers/{i}/mlp_norm"),
            ],
        ),
    ]
    if has_final_norm(config):
        rows += norm("decoder.final_layer_norm", "final_layer_norm")
    if is_projected(config):
        rows += linear("decoder.project_in", "project_in", (None, "embed"), bias=False)
        rows += linear("decoder.project_out", "project_out", ("embed", None), bias=False)
    return _initialised(config, rows)


def _initialised(config, rows: list[Row]) -> list[Row]:
    """Return `rows` with the config's deviation, which stands in a field of OPT's own."""
    return [replace(row, std=config.init_std) for row in rows]


# Public names.


class FlaxOPTPreTrainedModel(FlaxCausalModel):
    """What the OPT classes share. Without `position_ids`, positions are counted from the attention mask."""

    config_class: ClassVar[Any] = OPTConfig
    base_model_prefix = "model"
    words_key = "decoder.embed_tokens.weight"

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_fields(config, consumed=CONSUMED, allowed=ALLOWED, without_effect=WITHOUT_EFFECT)
        check_activation(config.activation_function, "activation_function")
        check_heads(config.hidden_size, config.num_attention_heads)

    @classmethod
    def base_rows(cls, config) -> list[Row]:
        """Rows of the base model, without its prefix."""
        return opt_rows(config)

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of a head that is not tied."""
        return _initialised(config, super().head_rows(config))


class FlaxOPTModel(FlaxOPTPreTrainedModel):
    """The decoder: hidden states."""

    module_class = OPTModule


class FlaxOPTForCausalLM(FlaxOPTPreTrainedModel):
    """Causal language modeling."""

    module_class = OPTForCausalLMModule
