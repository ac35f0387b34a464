"""BERT (Devlin et al. 2019, https://arxiv.org/abs/1810.04805)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from transformers import BertConfig

from distaff.core.errors import DataError
from distaff.models import _encoder_heads as heads
from distaff.models._encoder_heads import lm_head_rows, new_linear
from distaff.models._family import FlaxTextModel, check_activation, check_fields, check_heads
from distaff.models._outputs import FlaxBaseModelOutputWithPooling
from distaff.nn.dropout import Dropout
from distaff.nn.embed import embedding as embedding_table
from distaff.nn.heads import Pooler
from distaff.nn.layer import LayerInputs, TransformerLayer
from distaff.nn.mask import Sight, padding_mask
from distaff.nn.norm import LayerNorm
from distaff.nn.stack import Stack
from distaff.resizing import vocab_rows
from distaff.weights import Row, Tie, embedding, linear, norm, prefixed, repeated

# What the config means.

CONSUMED = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps "
    "classifier_dropout is_decoder tie_word_embeddings pad_token_id".split()
)
ALLOWED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "position_embedding_type": ("absolute", None),
    "pruned_heads": ({}, None),
}
# Left by the original release in its configs; they describe a pooler that BERT never had.
WITHOUT_EFFECT = (
    "pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
).split()


def check_bert_config(config) -> None:
    """Raise `ConfigError` for what is not implemented."""
    check_fields(config, consumed=CONSUMED, allowed=ALLOWED, without_effect=WITHOUT_EFFECT)
    check_activation(config.hidden_act)
    check_heads(config.hidden_size, config.num_attention_heads)


# The model.


class BertEmbeddings(nn.Module):
    """Sum of word, position and type embeddings, normalised.

    width: features of the tables, by default the hidden size. word_scale: factor on the word embeddings.
    """

    config: Any
    width: int | None = None
    word_scale: float | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, input_ids, token_type_ids, position_ids, *, deterministic: bool) -> jax.Array:
        """Return `[batch, length, embed]` for three `[batch, length]` arrays of ids."""
        config = self.config

        def look_up(name: str, size: int, ids: jax.Array, entries: str | None = None) -> jax.Array:
            table = embedding_table(
                size,
                self.width or config.hidden_size,
                initializer_range=config.initializer_range,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
                entries=entries,
            )
            return table(ids)

        words = look_up("word_embeddings", vocab_rows(config), input_ids, "vocab")
        total = words if self.word_scale is None else words * self.word_scale
        total = total + look_up("token_type_embeddings", config.type_vocab_size, token_type_ids)
        total = total + look_up("position_embeddings", config.max_position_embeddings, position_ids)
        norm = LayerNorm(eps=config.layer_norm_eps, dtype=self.dtype, param_dtype=self.param_dtype, name="norm")
        return self.finish(total, norm, Dropout(config.hidden_dropout_prob, deterministic=deterministic))

    def finish(self, total: jax.Array, norm: nn.Module, dropout: nn.Module) -> jax.Array:
        """Return the sum `[batch, length, embed]` after norm and dropout."""
        return dropout(norm(total))


class BertModule(nn.Module):
    """Embeddings, a stack of post-norm layers, and a pooler on the first token."""

    layer_class: ClassVar[Any] = TransformerLayer

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    add_pooling_layer: bool = True
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    def default_positions(self, input_ids: jax.Array) -> jax.Array:
        """Return `[batch, length]`: 0, 1, 2, ..."""
        return lax.broadcasted_iota(jnp.int32, input_ids.shape, 1)

    @staticmethod
    def longest(config) -> int:
        """Return the greatest length for which there are positions."""
        return config.max_position_embeddings

    def check_length(self, length: int) -> None:
        """Raise `DataError` for rows without positions."""
        longest = self.longest(self.config)
        if length > longest:
            raise DataError(
                f"Rows of {length} tokens are longer than the {longest} positions of the model "
                f"(max_position_embeddings={self.config.max_position_embeddings}): truncate them in the tokenizer."
            )

    @property
    def dtypes(self) -> dict[str, Any]:
        """The dtypes of all parts."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def embed(self, input_ids, token_type_ids, position_ids, *, deterministic: bool) -> jax.Array:
        """Return what goes into the stack, `[batch, length, embed]`."""
        embeddings = BertEmbeddings(self.config, **self.dtypes, name="embeddings")
        return embeddings(input_ids, token_type_ids, position_ids, deterministic=deterministic)

    def layer_inputs(self, hidden: jax.Array, attention_mask: jax.Array | None, *, deterministic: bool) -> Any:
        """Return what all layers share, for `hidden` `[batch, length, embed]`."""
        return LayerInputs(Sight(padding_mask(attention_mask), causal=self.config.is_decoder))

    def layer_fields(self) -> dict[str, Any]:
        """Return the fields of a layer."""
        config = self.config
        return {
            "num_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "activation": config.hidden_act,
            "norm_eps": config.layer_norm_eps,
            "norm_order": "post",
            "dropout_rate": config.hidden_dropout_prob,
            "attention_dropout_rate": config.attention_probs_dropout_prob,
            "initializer_range": config.initializer_range,
            **self.dtypes,
        }

    def pool(self, hidden: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Return `[batch, embed]`, or `[batch, texts, embed]`, for `hidden` `[batch, length, embed]`."""
        return Pooler(self.config.initializer_range, **self.dtypes, name="pooler")(hidden, first_tokens)

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        *,
        first_tokens: jax.Array | None = None,
        deterministic: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> FlaxBaseModelOutputWithPooling:
        """Encode `input_ids` `[batch, length]`; the other inputs have its shape.

        Packed rows have a mask `[batch, queries, keys]`, and the pooler the starts of their texts `[batch, texts]`.
        """
        config = self.config
        if position_ids is None:
            self.check_length(input_ids.shape[1])
            position_ids = self.default_positions(input_ids)
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(input_ids)
        hidden = self.embed(input_ids, token_type_ids, position_ids, deterministic=deterministic)
        encoder = Stack(
            self.layer_class,
            self.layer_fields(),
            config.num_hidden_layers,
            remat=self.gradient_checkpointing,
            scan=self.scan_layers,
            attn_implementation=self.attn_implementation,
            name="encoder",
        )
        outputs = encoder(
            hidden,
            self.layer_inputs(hidden, attention_mask, deterministic=deterministic),
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        pooled = self.pool(outputs.last, first_tokens) if self.add_pooling_layer else None
        return FlaxBaseModelOutputWithPooling(outputs.last, pooled, outputs.hidden_states, outputs.attentions)


# Heads.


class _OnBert:
    base_class = BertModule
    base_name = "bert"


class BertForMaskedLMModule(_OnBert, heads.ForMaskedLM):
    """`ForMaskedLM` on BERT."""


class BertForPreTrainingModule(_OnBert, heads.ForPreTraining):
    """`ForPreTraining` on BERT."""


class BertForNextSentencePredictionModule(_OnBert, heads.ForNextSentencePrediction):
    """`ForNextSentencePrediction` on BERT."""


class BertForSequenceClassificationModule(_OnBert, heads.ForSequenceClassification):
    """`ForSequenceClassification` on BERT."""


class BertForMultipleChoiceModule(_OnBert, heads.ForMultipleChoice):
    """`ForMultipleChoice` on BERT."""


class BertForTokenClassificationModule(_OnBert, heads.ForTokenClassification):
    """`ForTokenClassification` on BERT."""


class BertForQuestionAnsweringModule(_OnBert, heads.ForQuestionAnswering):
    """`ForQuestionAnswering` on BERT."""


# Rows.


def bert_rows(config, *, pooler: bool = True) -> list[Row]:
    """Rows of the base model."""
    layer = "encoder.layer.{i}"
    rows = [
        *embedding("embeddings.word_embeddings", "embeddings/word_embeddings", ("vocab", "embed")),
        *embedding("embeddings.position_embeddings", "embeddings/position_embeddings", (None, "embed")),
        *embedding("embeddings.token_type_embeddings", "embeddings/token_type_embeddings", (None, "embed")),
        *norm("embeddings.LayerNorm", "embeddings/norm"),
        *repeated(
            config.num_hidden_layers,
            [
                *linear(f"{layer}.attention.self.query", "encoder/{i}/attention/query", ("embed", "heads")),
                *linear(f"{layer}.attention.self.key", "encoder/{i}/attention/key", ("embed", "heads")),
                *linear(f"{layer}.attention.self.value", "encoder/{i}/attention/value", ("embed", "heads")),
                *linear(f"{layer}.attention.output.dense", "encoder/{i}/attention/out", ("heads", "embed")),
                *norm(f"{layer}.attention.output.LayerNorm", "encoder/{i}/attention_norm"),
                *linear(f"{layer}.intermediate.dense", "encoder/{i}/mlp/up", ("embed", "mlp")),
                *linear(f"{layer}.output.dense", "encoder/{i}/mlp/down", ("mlp", "embed")),
                *norm(f"{layer}.output.LayerNorm", "encoder/{i}/mlp_norm"),
            ],
        ),
    ]
    if pooler:
        rows += linear("pooler.dense", "pooler/dense", ("embed", None), required=False)
    return rows


def bert_lm_head_rows(config) -> list[Row]:
    """Rows of the LM head."""
    head = "cls.predictions"
    return lm_head_rows(config, f"{head}.transform.dense", f"{head}.transform.LayerNorm", head)


# Public names.


class FlaxBertPreTrainedModel(FlaxTextModel):
    """What the BERT classes share."""

    config_class: ClassVar[Any] = BertConfig
    base_model_prefix = "bert"
    accepts_pairwise_mask = True
    # A buffer that old versions of Transformers saved.
    ignored_keys = (r"(^|\.)embeddings\.position_ids$",)

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_bert_config(config)

    @classmethod
    def base_rows(cls, config, *, pooler: bool = True) -> list[Row]:
        """Rows of the whole base model, without its prefix."""
        return bert_rows(config, pooler=pooler)

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of the head."""
        return []

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of all parameters of `module`."""
        base = cls.base_rows(module.config, pooler=module.add_pooling_layer)
        return base if cls._is_base() else [*prefixed(cls.base_model_prefix, base), *cls.head_rows(module.config)]


class FlaxBertModel(FlaxBertPreTrainedModel):
    """The encoder: hidden states, and the pooled first token."""

    module_class = BertModule


class _TiedLM(FlaxBertPreTrainedModel):
    accepts_masked_positions = True

    @classmethod
    def ties(cls, config) -> tuple[Tie, ...]:
        """The decoder repeats the word embeddings."""
        return (Tie("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),)


class FlaxBertForMaskedLM(_TiedLM):
    """Masked language modeling."""

    module_class = BertForMaskedLMModule
    head_rows = staticmethod(bert_lm_head_rows)


class FlaxBertForPreTraining(_TiedLM):
    """Masked language modeling and next sentence prediction."""

    module_class = BertForPreTrainingModule

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of both heads."""
        return [*bert_lm_head_rows(config), *new_linear("cls.seq_relationship")]


class FlaxBertForNextSentencePrediction(FlaxBertPreTrainedModel):
    """Next sentence prediction."""

    module_class = BertForNextSentencePredictionModule
    head_rows = staticmethod(lambda config: new_linear("cls.seq_relationship"))


class FlaxBertForSequenceClassification(FlaxBertPreTrainedModel):
    """Classification or regression of texts and pairs of texts."""

    module_class = BertForSequenceClassificationModule
    further_inputs = ("first_tokens",)
    head_rows = staticmethod(lambda config: new_linear("classifier"))


class FlaxBertForMultipleChoice(FlaxBertPreTrainedModel):
    """Choice among several continuations; inputs are `[batch, choices, length]`."""

    module_class = BertForMultipleChoiceModule
    input_rank = 3
    head_rows = staticmethod(lambda config: new_linear("classifier"))

    def dummy_inputs(self, input_shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Inputs `[batch, choices, length]`."""
        # Named, not super(): RoBERTa's class borrows this method.
        shape = input_shape if len(input_shape) == 3 else (input_shape[0], 1, input_shape[1])
        return FlaxTextModel.dummy_inputs(self, shape)


class FlaxBertForTokenClassification(FlaxBertPreTrainedModel):
    """Classification of each token."""

    module_class = BertForTokenClassificationModule
    head_rows = staticmethod(lambda config: new_linear("classifier"))


class FlaxBertForQuestionAnswering(FlaxBertPreTrainedModel):
    """Extractive question answering."""

    module_class = BertForQuestionAnsweringModule
    head_rows = staticmethod(lambda config: new_linear("qa_outputs"))
