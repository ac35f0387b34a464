"""BART (Lewis et al. 2019, https://arxiv.org/abs/1910.13461)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from transformers import BartConfig

from distaff.core.errors import DataError
from distaff.models import _encoder_decoder as parts
from distaff.models._causal import next_positions
from distaff.models._encoder_decoder import EncoderDecoder, HeadedEncoderDecoder, StackInputs
from distaff.models._family import check_activation, check_fields, check_heads
from distaff.models._outputs import FlaxSeq2SeqQuestionAnsweringModelOutput, FlaxSeq2SeqSequenceClassifierOutput
from distaff.models._seq2seq import FlaxSeq2SeqModel
from distaff.nn.dropout import Dropout
from distaff.nn.embed import embedding as embedding_table
from distaff.nn.layer import LayerInputs, TransformerLayer
from distaff.nn.norm import LayerNorm
from distaff.nn.stack import Stack, StackOutputs
from distaff.nn.vocabulary import Projection
from distaff.resizing import vocab_rows
from distaff.weights import Row, Tie, embedding, linear, norm, prefixed, repeated

# What the config means.

CONSUMED = frozenset(
    "vocab_size d_model max_position_embeddings encoder_layers decoder_layers encoder_attention_heads "
    "decoder_attention_heads encoder_ffn_dim decoder_ffn_dim encoder_layerdrop decoder_layerdrop activation_function "
    "dropout attention_dropout activation_dropout classifier_dropout init_std scale_embedding pad_token_id "
    "eos_token_id decoder_start_token_id tie_word_embeddings".split()
)
# The last four say in old configs what every BART is.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "normalize_before": (False,),
    "add_final_layer_norm": (False,),
    "normalize_embedding": (True,),
    "static_position_embeddings": (False,),
}
# Names of old configs: for the offset of positions, which is always 2, a bias that is always in the file, the
# classifier's dropout before it was renamed, and generation.
WITHOUT_EFFECT = (
    "extra_pos_embeddings add_bias_logits classif_dropout num_hidden_layers force_bos_token_to_be_generated"
).split()

# The config has no eps: PyTorch's BART builds nn.LayerNorm with that class's default.
NORM_EPS = 1e-5
# fairseq's position tables start behind the rows of bos and padding, whatever their ids are.
POSITION_OFFSET = 2


# The model.


class BartStack(nn.Module):
    """Positions, a norm on the embeddings, and the layers of the encoder or the decoder."""

    config: Any
    is_decoder: bool
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    norm_order: ClassVar[Literal["pre", "post"]] = "post"
    final_norm: ClassVar[bool] = False

    def side(self, name: str) -> Any:
        """Return the config's field of this half."""
        return getattr(self.config, f"{'decoder' if self.is_decoder else 'encoder'}_{name}")

    @nn.compact
    def __call__(
        self,
        embedded: jax.Array,
        inputs: StackInputs,
        *,
        deterministic: bool,
        output_hidden_states: bool,
        output_attentions: bool,
    ) -> StackOutputs:
        """Run word embeddings `[batch, length, embed]` through the layers."""
        config, cache = self.config, inputs.cache
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        table = embedding_table(
            config.max_position_embeddings + POSITION_OFFSET,
            config.d_model,
            initializer_range=config.init_std,
            **dtypes,
            name="embed_positions",
        )
        positions = next_positions(embedded[..., 0], cache) if inputs.position_ids is None else inputs.position_ids
        hidden = embedded + table(positions + POSITION_OFFSET)  # [batch, length, embed]
        hidden = LayerNorm(eps=NORM_EPS, **dtypes, name="layernorm_embedding")(hidden)
        hidden = Dropout(config.dropout)(hidden, deterministic=deterministic)
        layer_fields = {
            "num_heads": self.side("attention_heads"),
            "intermediate_size": self.side("ffn_dim"),
            "activation": config.activation_function,
            "norm_eps": NORM_EPS,
            "norm_order": self.norm_order,
            "dropout_rate": config.dropout,
            "attention_dropout_rate": config.attention_dropout,
            "initializer_range": config.init_std,
            "cross_attention": self.is_decoder,
            "mlp_fields": {"dropout_rate": config.activation_dropout},
            **dtypes,
        }
        start = None if cache is None else cache.filled
        outputs = Stack(
            TransformerLayer,
            layer_fields,
            self.side("layers"),
            remat=self.gradient_checkpointing,
            scan=self.scan_layers,
            attn_implementation=self.attn_implementation,
            layerdrop=self.side("layerdrop"),
            name="layers",
        )(
            hidden,
            LayerInputs(inputs.sight, inputs.source, inputs.source_sight, start),
            None if cache is None else cache.layers,
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        if not self.final_norm:
            return outputs
        last = LayerNorm(eps=NORM_EPS, **dtypes, name="layer_norm")(outputs.last)
        states = outputs.hidden_states
        return outputs._replace(last=last, hidden_states=None if states is None else (*states[:-1], last))


class BartModule(EncoderDecoder):
    """The base model."""

    stack_class = BartStack

    def embed(self, input_ids: jax.Array) -> jax.Array:
        """Return word embeddings `[batch, length, embed]`, scaled where the config says so."""
        scale = self.config.d_model**0.5 if self.config.scale_embedding else 1.0
        return self.shared(input_ids) * scale


# Heads.


class BartForConditionalGenerationModule(parts.ForConditionalGeneration):
    """`ForConditionalGeneration` on BART, with a bias that is not trained."""

    base_class = BartModule

    def setup_head(self) -> None:
        """Make the bias, and the projection where it is not tied."""
        super().setup_head()
        shape = (1, vocab_rows(self.config))
        self.final_logits_bias = self.param("final_logits_bias", nn.initializers.zeros, shape, self.param_dtype)

    def projection(self, hidden: jax.Array) -> Projection:
        """Return the logits to be of `hidden` `[batch, length, embed]`."""
        # A buffer in PyTorch, no parameter: it gets no gradient.
        return replace(super().projection(hidden), bias=jax.lax.stop_gradient(self.final_logits_bias[0]))


class BartClassificationHead(nn.Module):
    """A hidden layer with tanh and a projection, both behind dropout."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, *, deterministic: bool) -> jax.Array:
        """Return `[batch, num_labels]` for `hidden` `[batch, embed]`."""
        config = self.config

        def dense(values: jax.Array, features: int, name: str) -> jax.Array:
            values = Dropout(config.classifier_dropout)(values, deterministic=deterministic)
            init = nn.initializers.normal(config.init_std)
            fields: dict[str, Any] = {"kernel_init": init, "dtype": self.dtype, "param_dtype": self.param_dtype}
            return nn.Dense(features, **fields, name=name)(values)

        return dense(jnp.tanh(dense(hidden, config.d_model, "dense")), config.num_labels, "out_proj")


class BartForSequenceClassificationModule(HeadedEncoderDecoder):
    """A class, or a number, for the whole text, from the decoder's state at the last end of sentence."""

    base_class = BartModule

    def setup_head(self) -> None:
        """Make the classifier."""
        self.classification_head = BartClassificationHead(self.config, self.dtype, self.param_dtype)

    def __call__(self, input_ids: jax.Array, *inputs: Any, **options: Any) -> FlaxSeq2SeqSequenceClassifierOutput:
        """Return logits `[batch, num_labels]`."""
        outputs = self.model(input_ids, *inputs, **options)
        ends = jnp.isin(input_ids, jnp.asarray(self.config.eos_token_id))
        last = input_ids.shape[1] - 1 - jnp.argmax(ends[:, ::-1], axis=1)  # [batch]
        sentence = jnp.take_along_axis(outputs.last_hidden_state, last[:, None, None], axis=1)[:, 0]
        logits = self.classification_head(sentence, deterministic=options.get("deterministic", True))
        return FlaxSeq2SeqSequenceClassifierOutput(logits=logits, **outputs.states())


class BartForQuestionAnsweringModule(HeadedEncoderDecoder):
    """Start and end of the answer."""

    base_class = BartModule

    def setup_head(self) -> None:
        """Make the projection."""
        init = nn.initializers.normal(self.config.init_std)
        self.qa_outputs = nn.Dense(2, kernel_init=init, dtype=self.dtype, param_dtype=self.param_dtype)

    def __call__(self, *inputs: Any, **options: Any) -> FlaxSeq2SeqQuestionAnsweringModelOutput:
        """Return start and end logits, each `[batch, length]`."""
        outputs = self.model(*inputs, **options)
        logits = self.qa_outputs(outputs.last_hidden_state)
        return FlaxSeq2SeqQuestionAnsweringModelOutput(
            start_logits=logits[..., 0], end_logits=logits[..., 1], **outputs.states()
        )


# Rows.


def started(config, rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the config's standard deviation of random weights."""
    return [replace(row, std=config.init_std) for row in rows]


def _attention_rows(key: str, path: str) -> list[Row]:
    return [
        *linear(f"{key}.q_proj", f"{path}/query", ("embed", "heads")),
        *linear(f"{key}.k_proj", f"{path}/key", ("embed", "heads")),
        *linear(f"{key}.v_proj", f"{path}/value", ("embed", "heads")),
        *linear(f"{key}.out_proj", f"{path}/out", ("heads", "embed")),
    ]


def _stack_rows(config, side: str, final_norm: bool) -> list[Row]:
    cross = [
        *_attention_rows("layers.{i}.encoder_attn", "layers/{i}/cross_attention"),
        *norm("layers.{i}.encoder_attn_layer_norm", "layers/{i}/cross_attention_norm"),
    ]
    layer = [
        *_attention_rows("layers.{i}.self_attn", "layers/{i}/attention"),
        *norm("layers.{i}.self_attn_layer_norm", "layers/{i}/attention_norm"),
        *(cross if side == "decoder" else []),
        *linear("layers.{i}.fc1", "layers/{i}/mlp/up", ("embed", "mlp")),
        *linear("layers.{i}.fc2", "layers/{i}/mlp/down", ("mlp", "embed")),
        *norm("layers.{i}.final_layer_norm", "layers/{i}/mlp_norm"),
    ]
    rows = [
        *embedding("embed_positions", "embed_positions", (None, "embed")),
        *norm("layernorm_embedding", "layernorm_embedding"),
        *repeated(getattr(config, f"{side}_layers"), layer),
        *(norm("layer_norm", "layer_norm") if final_norm else []),
    ]
    return prefixed(side, rows)


def bart_rows(config, *, final_norm: bool) -> list[Row]:
    """Rows of the base model."""
    repeats = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    # With an untied head, Transformers does not tie the embeddings of the two halves either: it wants each written.
    copies = () if config.tie_word_embeddings else repeats
    return started(
        config,
        [
            *embedding("shared", "shared", ("vocab", "embed"), repeats=repeats, copies=copies),
            *_stack_rows(config, "encoder", final_norm),
            *_stack_rows(config, "decoder", final_norm),
        ],
    )


# Public names.


class FlaxBartPreTrainedModel(FlaxSeq2SeqModel):
    """What the BART classes share."""

    config_class: ClassVar[Any] = BartConfig
    base_model_prefix = "model"
    decodes_source = True
    # Written by old versions of fairseq's conversion.
    ignored_keys = (r"(^|\.)(encoder|decoder)\.version$",)
    allowed: ClassVar[dict[str, tuple[Any, ...]]] = ALLOWED
    final_norm: ClassVar[bool] = False

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_fields(config, consumed=CONSUMED, allowed=cls.allowed, without_effect=WITHOUT_EFFECT)
        check_activation(config.activation_function)
        check_heads(config.d_model, config.encoder_attention_heads)
        check_heads(config.d_model, config.decoder_attention_heads)

    @classmethod
    def base_rows(cls, config) -> list[Row]:
        """Rows of the base model, without its prefix."""
        return bart_rows(config, final_norm=cls.final_norm)

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of what stands on the base."""
        return []

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of all parameters of `module`."""
        base = cls.base_rows(module.config)
        if cls._is_base():
            return base
        return prefixed(cls.base_model_prefix, base) + started(module.config, cls.head_rows(module.config))

    @property
    def decoder_start_token_id(self) -> int | None:
        """The config's, or where it names none the end of a sentence, which BartConfig has as its default."""
        start = super().decoder_start_token_id
        return self.config.eos_token_id if start is None else start


class FlaxBartModel(FlaxBartPreTrainedModel):
    """Encoder and decoder: hidden states."""

    module_class = BartModule


class FlaxBartForConditionalGeneration(FlaxBartPreTrainedModel):
    """Summaries, translations, denoising: logits of the next token."""

    module_class = BartForConditionalGenerationModule

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of the bias, and of a projection that is not tied."""
        rows = [Row("final_logits_bias", "final_logits_bias", "bias", (None, "vocab"), required=False)]
        if not config.tie_word_embeddings:
            rows += linear("lm_head", "lm_head", ("embed", "vocab"), bias=False, required=False)
        return rows

    @classmethod
    def ties(cls, config) -> tuple[Tie, ...]:
        """The head repeats the word embeddings."""
        return (Tie("lm_head.weight", "model.shared.weight"),)


class FlaxBartForSequenceClassification(FlaxBartPreTrainedModel):
    """Classification of texts."""

    module_class = BartForSequenceClassificationModule

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of the classifier."""
        return [
            *linear("classification_head.dense", "classification_head/dense", ("embed", None), required=False),
            *linear("classification_head.out_proj", "classification_head/out_proj", ("embed", None), required=False),
        ]

    def _check(self, ids, mask, positions, side: str = "", cache=None) -> None:
        super()._check(ids, mask, positions, side, cache)
        if side or isinstance(ids, jax.core.Tracer):
            return
        counts = np.isin(np.asarray(ids), self.config.eos_token_id).sum(axis=1)
        if counts.min() == 0 or counts.min() != counts.max():
            raise DataError(
                f"Rows of input_ids hold {counts.min()} to {counts.max()} ends of sentence (token "
                f"{self.config.eos_token_id}): the classifier reads the last one, give each row the same number, one "
                "or more."
            )


class FlaxBartForQuestionAnswering(FlaxBartPreTrainedModel):
    """Extractive question answering."""

    module_class = BartForQuestionAnsweringModule

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of the projection."""
        return linear("qa_outputs", "qa_outputs", ("embed", None), required=False)
