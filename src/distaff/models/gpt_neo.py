"""GPT-Neo (Black et al. 2021, https://doi.org/10.5281/zenodo.5297715)."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from transformers import GPTNeoConfig

from distaff.core.errors import ConfigError
from distaff.models import _causal as causal
from distaff.models._causal import FlaxCausalModel, causal_sight, next_positions, run_layers
from distaff.models._family import check_activation, check_fields, check_heads
from distaff.models._outputs import FlaxBaseModelOutputWithPast
from distaff.nn.cache import Cache
from distaff.nn.dropout import Dropout
from distaff.nn.embed import embedding as embedding_table
from distaff.nn.layer import LayerInputs, TransformerLayer
from distaff.nn.mask import UNBOUNDED, Sight
from distaff.nn.norm import LayerNorm
from distaff.nn.stack import Stack
from distaff.resizing import vocab_rows
from distaff.weights import Row, embedding, linear, norm, repeated

# What the config means.

CONSUMED = frozenset(
    "vocab_size max_position_embeddings hidden_size num_layers num_heads attention_types attention_layers "
    "intermediate_size window_size activation_function resid_dropout embed_dropout attention_dropout "
    "layer_norm_epsilon initializer_range tie_word_embeddings".split()
)
ALLOWED: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (False,), "pruned_heads": ({}, None)}
# classifier_dropout and the summary_* fields of old files belong to heads that are not among ours.
WITHOUT_EFFECT = (
    "pad_token_id is_decoder classifier_dropout summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels summary_first_dropout"
).split()


def inner_size(config) -> int:
    """Return the width of the feed-forward blocks."""
    return config.intermediate_size if config.intermediate_size is not None else 4 * config.hidden_size


# The model.


class GPTNeoLayer(TransformerLayer):
    """A pre-norm layer that sees all keys up to the query, or the last few: `windows` says how many for each number."""

    windows: tuple[int, ...] = ()

    def own_sight(self, shared: LayerInputs, number: jax.Array | int) -> Sight | None:
        """Return what the layer sees, with its window."""
        assert shared.sight is not None
        return replace(shared.sight, window=jnp.asarray(self.windows, jnp.int32)[number])


class GPTNeoModule(nn.Module):
    """Word and position embeddings, pre-norm layers of two kinds, and a norm at the end."""

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
        config, cache = self.config, past_key_values
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        tables = {"initializer_range": config.initializer_range, **dtypes}
        words = embedding_table(vocab_rows(config), config.hidden_size, **tables, entries="vocab", name="wte")
        positions = embedding_table(config.max_position_embeddings, config.hidden_size, **tables, name="wpe")
        if position_ids is None:
            position_ids = next_positions(input_ids, cache)
        hidden = words(input_ids) + positions(position_ids)  # [batch, length, embed]
        hidden = Dropout(config.embed_dropout)(hidden, deterministic=deterministic)
        layer_fields = {
            "num_heads": config.num_heads,
            "intermediate_size": inner_size(config),
            "activation": config.activation_function,
            "norm_eps": config.layer_norm_epsilon,
            "norm_order": "pre",
            "dropout_rate": config.resid_dropout,
            "attention_dropout_rate": config.attention_dropout,
            "initializer_range": config.initializer_range,
            # Scores are not scaled: the initialisation of Mesh TensorFlow, where GPT-Neo was trained, did it once.
            "attention_fields": {"use_bias": False, "scale": 1.0, "float32_scores": True},
            "windows": tuple(config.window_size if kind == "local" else UNBOUNDED for kind in config.attention_layers),
            **dtypes,
        }
        stack = Stack(
            GPTNeoLayer,
            layer_fields,
            config.num_layers,
            remat=self.gradient_checkpointing,
            scan=self.scan_layers,
            attn_implementation=self.attn_implementation,
            name="h",
        )
        return run_layers(
            stack,
            hidden,
            causal_sight(attention_mask, cache),
            cache,
            finish=LayerNorm(eps=config.layer_norm_epsilon, **dtypes, name="ln_f"),
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )


class GPTNeoForCausalLMModule(causal.ForCausalLM):
    """`ForCausalLM` on GPT-Neo."""

    base_class = GPTNeoModule
    base_name = "transformer"
    table_path = ("wte", "embedding")


# Rows.


def gpt_neo_rows(config) -> list[Row]:
    """Rows of the base model."""
    projections = [
        row
        for name in ("query", "key", "value")
        for row in linear(
            f"h.{{i}}.attn.attention.{name[0]}_proj", f"h/{{i}}/attention/{name}", ("embed", "heads"), bias=False
        )
    ]
    return [
        *embedding("wte", "wte", ("vocab", "embed")),
        *embedding("wpe", "wpe", (None, "embed")),
        *repeated(
            config.num_layers,
            [
                *norm("h.{i}.ln_1", "h/{i}/attention_norm"),
                *projections,
                *linear("h.{i}.attn.attention.out_proj", "h/{i}/attention/out", ("heads", "embed")),
                *norm("h.{i}.ln_2", "h/{i}/mlp_norm"),
                *linear("h.{i}.mlp.c_fc", "h/{i}/mlp/up", ("embed", "mlp")),
                *linear("h.{i}.mlp.c_proj", "h/{i}/mlp/down", ("mlp", "embed")),
            ],
        ),
        *norm("ln_f", "ln_f"),
    ]


# Public names.


class FlaxGPTNeoPreTrainedModel(FlaxCausalModel):
    """What the GPT-Neo classes share."""

    config_class: ClassVar[Any] = GPTNeoConfig
    base_model_prefix = "transformer"
    # Buffers that old versions of Transformers saved.
    ignored_keys = (r"(^|\.)h\.\d+\.attn\.attention\.(bias|masked_bias)$",)

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_fields(config, consumed=CONSUMED, allowed=ALLOWED, without_effect=WITHOUT_EFFECT)
        check_activation(config.activation_function, "activation_function")
        check_heads(config.hidden_size, config.num_heads, ("hidden_size", "num_heads"))
        kinds = config.attention_layers
        if len(kinds) != config.num_layers or not {"global", "local"}.issuperset(kinds):
            raise ConfigError(
                f"attention_layers={list(kinds)!r} with num_layers={config.num_layers}: name 'global' or 'local' for "
                "each layer, by attention_types=[[[global,local],N]]."
            )

    @classmethod
    def base_rows(cls, config) -> list[Row]:
        """Rows of the base model, without its prefix."""
        return gpt_neo_rows(config)


class FlaxGPTNeoModel(FlaxGPTNeoPreTrainedModel):
    """The decoder: hidden states."""

    module_class = GPTNeoModule


class FlaxGPTNeoForCausalLM(FlaxGPTNeoPreTrainedModel):
    """Causal language modeling."""

    module_class = GPTNeoForCausalLMModule
