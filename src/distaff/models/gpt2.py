"""GPT-2 (Radford et al. 2019, https://openai.com/research/better-language-models)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from transformers import GPT2Config

from distaff.models import _causal as causal
from distaff.models._causal import FlaxCausalModel, causal_sight, next_positions, run_layers
from distaff.models._family import check_activation, check_fields, check_heads
from distaff.models._outputs import FlaxBaseModelOutputWithPast
from distaff.nn.cache import Cache
from distaff.nn.dropout import Dropout
from distaff.nn.embed import embedding as embedding_table
from distaff.nn.layer import TransformerLayer
from distaff.nn.norm import LayerNorm
from distaff.nn.stack import Stack
from distaff.resizing import vocab_rows
from distaff.weights import Row, conv1d, embedding, fused_conv1d, norm, repeated

# What the config means.

CONSUMED = frozenset(
    "vocab_size n_positions n_embd n_layer n_head n_inner activation_function resid_pdrop embd_pdrop attn_pdrop "
    "layer_norm_epsilon initializer_range scale_attn_weights scale_attn_by_inverse_layer_idx "
    "reorder_and_upcast_attn tie_word_embeddings".split()
)
ALLOWED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
}
# The summary_* fields belong to a head that is not among ours.
WITHOUT_EFFECT = (
    "pad_token_id is_decoder summary_type summary_use_proj summary_activation summary_proj_to_labels "
    "summary_first_dropout n_ctx"
).split()


def inner_size(config) -> int:
    """Return the width of the feed-forward blocks."""
    return config.n_inner if config.n_inner is not None else 4 * config.n_embd


# The model.


class GPT2Layer(TransformerLayer):
    """A pre-norm layer whose scores may be scaled by its place in the stack."""

    scale_weights: bool = True
    scale_by_inverse_index: bool = False

    def attention_scale(self, number: jax.Array | int) -> jax.Array | float:
        """Return the factor on the scores of layer `number`."""
        head_dim = (self.attention_fields or {})["head_dim"]
        scale = head_dim**-0.5 if self.scale_weights else 1.0
        return scale / (number + 1) if self.scale_by_inverse_index else scale


class GPT2Module(nn.Module):
    """Word and position embeddings, pre-norm layers, and a norm at the end."""

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
        words = embedding_table(vocab_rows(config), config.n_embd, **tables, entries="vocab", name="wte")
        positions = embedding_table(config.n_positions, config.n_embd, **tables, name="wpe")
        if position_ids is None:
            position_ids = next_positions(input_ids, cache)
        hidden = words(input_ids) + positions(position_ids)  # [batch, length, embed]
        hidden = Dropout(config.embd_pdrop)(hidden, deterministic=deterministic)
        layer_fields = {
            "num_heads": config.n_head,
            "intermediate_size": inner_size(config),
            "activation": config.activation_function,
            "norm_eps": config.layer_norm_epsilon,
            "norm_order": "pre",
            "dropout_rate": config.resid_pdrop,
            "attention_dropout_rate": config.attn_pdrop,
            "initializer_range": config.initializer_range,
            "attention_fields": {
                "fused": True,
                "head_dim": config.n_embd // config.n_head,
                "float32_scores": config.reorder_and_upcast_attn,
            },
            "scale_weights": config.scale_attn_weights,
            "scale_by_inverse_index": config.scale_attn_by_inverse_layer_idx,
            **dtypes,
        }
        stack = Stack(
            GPT2Layer,
            layer_fields,
            config.n_layer,
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


class GPT2LMHeadModule(causal.ForCausalLM):
    """`ForCausalLM` on GPT-2."""

    base_class = GPT2Module
    base_name = "transformer"
    table_path = ("wte", "embedding")


# Rows.


def gpt2_rows(config) -> list[Row]:
    """Rows of the base model. Projections into the residual stream start smaller, as the paper says."""
    residual = config.initializer_range / (2 * config.n_layer) ** 0.5
    return [
        *embedding("wte", "wte", ("vocab", "embed")),
        *embedding("wpe", "wpe", (None, "embed")),
        *repeated(
            config.n_layer,
            [
                *norm("h.{i}.ln_1", "h/{i}/attention_norm"),
                *fused_conv1d("h.{i}.attn.c_attn", "h/{i}/attention/qkv", ("embed", "heads")),
                *conv1d("h.{i}.attn.c_proj", "h/{i}/attention/out", ("heads", "embed"), std=residual),
                *norm("h.{i}.ln_2", "h/{i}/mlp_norm"),
                *conv1d("h.{i}.mlp.c_fc", "h/{i}/mlp/up", ("embed", "mlp")),
                *conv1d("h.{i}.mlp.c_proj", "h/{i}/mlp/down", ("mlp", "embed"), std=residual),
            ],
        ),
        *norm("ln_f", "ln_f"),
    ]


# Public names.


class FlaxGPT2PreTrainedModel(FlaxCausalModel):
    """What the GPT-2 classes share."""

    config_class: ClassVar[Any] = GPT2Config
    base_model_prefix = "transformer"
    # Buffers that old versions of Transformers saved.
    ignored_keys = (r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$",)

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_fields(config, consumed=CONSUMED, allowed=ALLOWED, without_effect=WITHOUT_EFFECT)
        check_activation(config.activation_function, "activation_function")
        check_heads(config.n_embd, config.n_head, ("n_embd", "n_head"))

    @classmethod
    def base_rows(cls, config) -> list[Row]:
        """Rows of the base model, without its prefix."""
        return gpt2_rows(config)


class FlaxGPT2Model(FlaxGPT2PreTrainedModel):
    """The decoder: hidden states."""

    module_class = GPT2Module


class FlaxGPT2LMHeadModel(FlaxGPT2PreTrainedModel):
    """Causal language modeling."""

    module_class = GPT2LMHeadModule


FlaxGPT2ForCausalLM = FlaxGPT2LMHeadModel
