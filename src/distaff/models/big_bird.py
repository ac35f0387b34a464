"""BigBird (Zaheer et al. 2020, https://arxiv.org/abs/2007.14062): BERT with block-sparse attention for long texts."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from transformers import BigBirdConfig

from distaff.core.errors import ConfigError, DataError, UsageError
from distaff.models import _encoder_heads as heads
from distaff.models._block_sparse import Blocks, BlockWeights, attend_blocks, draw_blocks, least_sparse
from distaff.models._encoder_heads import dense_classification_rows, new_linear
from distaff.models._family import check_activation, check_fields, check_heads
from distaff.models._outputs import (
    FlaxBaseModelOutputWithPooling,
    FlaxNaturalQuestionsOutput,
    FlaxQuestionAnsweringModelOutput,
)
from distaff.models.bert import (
    ALLOWED,
    CONSUMED,
    BertEmbeddings,
    BertModule,
    FlaxBertForMaskedLM,
    FlaxBertForMultipleChoice,
    FlaxBertForPreTraining,
    FlaxBertPreTrainedModel,
    bert_rows,
)
from distaff.nn.act import ACTIVATIONS, Activation
from distaff.nn.attention import Attention
from distaff.nn.cache import KeyValue
from distaff.nn.dropout import Dropout
from distaff.nn.layer import LayerInputs, TransformerLayer
from distaff.nn.mlp import MLP
from distaff.nn.norm import LayerNorm
from distaff.weights import Row, linear, norm

# What the config means.

_CONSUMED = CONSUMED | {"use_bias", "rescale_embeddings", "block_size", "num_random_blocks", "sep_token_id"}
_ALLOWED: dict[str, tuple[Any, ...]] = {
    **ALLOWED,
    "attention_type": ("block_sparse", "original_full"),
    "is_decoder": (False,),
}
# How much a logit of the question is lowered, as in PyTorch.
_QUESTION_PENALTY = 1e6
# Long answer or none, short answer, yes, no: the kinds of answers of the Natural Questions baseline.
_CATEGORIES = 5


def is_sparse(config, length: int) -> bool:
    """Tell whether rows of `length` tokens are attended to by blocks; shorter ones are attended to in full."""
    sparse = config.attention_type == "block_sparse"
    return sparse and length > least_sparse(config.block_size, config.num_random_blocks)


# The model.


class BigBirdEmbeddings(BertEmbeddings):
    """BERT's, with dropout before the norm."""

    def finish(self, total: jax.Array, norm: nn.Module, dropout: nn.Module) -> jax.Array:
        """Return the sum `[batch, length, embed]` after dropout and norm."""
        return norm(dropout(total))


class BigBirdAttention(Attention):
    """Attention that is block-sparse where it gets `Blocks` instead of a sight.

    Random blocks are drawn from the step's key while training. In evaluation they are all the first one, as in
    PyTorch. Weights by blocks are not dropped out, as in PyTorch.
    """

    num_random_blocks: int = 0

    def attend(
        self, query: jax.Array, used: KeyValue, sight: Any, *, scale: jax.Array | float, deterministic: bool
    ) -> tuple[jax.Array, Any]:
        """Return `[batch, heads, queries, head_dim]` and the weights, as `BlockWeights` where sparse."""
        if not isinstance(sight, Blocks):
            return super().attend(query, used, sight, scale=scale, deterministic=deterministic)
        if self.implementation not in ("auto", "eager"):
            raise UsageError(
                f"attn_implementation is '{self.implementation}', and the config's attention_type 'block_sparse': "
                "leave the first out, or set attention_type='original_full'."
            )
        drawn = None
        if not deterministic and self.num_random_blocks:
            blocks, size = sight.real.shape[1:]
            fields = {"num_random": self.num_random_blocks, "num_heads": self.num_heads}
            drawn = draw_blocks(self.make_rng("dropout"), blocks, size, **fields)
        return attend_blocks(query, used, sight.real, scale=scale, drawn=drawn, repeats=self.num_random_blocks)


class BigBirdLayer(TransformerLayer):
    """BERT's layer with `BigBirdAttention`."""

    attention_class: ClassVar[type[Attention]] = BigBirdAttention


class BigBirdModule(BertModule):
    """BERT whose layers attend by blocks; rows are padded to whole blocks inside, and cut back."""

    layer_class: ClassVar[Any] = BigBirdLayer

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        **options: Any,
    ) -> FlaxBaseModelOutputWithPooling:
        """Encode `input_ids` `[batch, length]`; the other inputs have its shape."""
        length = input_ids.shape[1]
        sparse = is_sparse(self.config, length)
        if sparse and attention_mask is not None and attention_mask.ndim != 2:
            raise DataError(
                f"attention_mask has {attention_mask.ndim} axes: block-sparse attention takes one of [batch, length]; "
                "set attention_type='original_full' in the config for masks by query."
            )
        missing = -length % self.config.block_size if sparse else 0
        if missing:
            if position_ids is None:
                self.check_length(length)
                position_ids = self.default_positions(input_ids)
            if attention_mask is None:
                attention_mask = jnp.ones_like(input_ids)
            padding = (0, 0), (0, missing)
            input_ids, attention_mask, position_ids = (
                jnp.pad(each, padding) for each in (input_ids, attention_mask, position_ids)
            )
            token_type_ids = None if token_type_ids is None else jnp.pad(token_type_ids, padding)
        outputs = super().__call__(input_ids, attention_mask, token_type_ids, position_ids, **options)
        return _cut(outputs, length) if sparse else outputs

    def embed(self, input_ids, token_type_ids, position_ids, *, deterministic: bool) -> jax.Array:
        """Return what goes into the stack, `[batch, length, embed]`."""
        config = self.config
        word_scale = config.hidden_size**0.5 if config.rescale_embeddings else None
        embeddings = BigBirdEmbeddings(config, word_scale=word_scale, **self.dtypes, name="embeddings")
        return embeddings(input_ids, token_type_ids, position_ids, deterministic=deterministic)

    def layer_inputs(self, hidden: jax.Array, attention_mask: jax.Array | None, *, deterministic: bool) -> Any:
        """Return what all layers share, for `hidden` `[batch, length, embed]`."""
        if not is_sparse(self.config, hidden.shape[1]):
            return super().layer_inputs(hidden, attention_mask, deterministic=deterministic)
        real = jnp.ones(hidden.shape[:2], bool) if attention_mask is None else attention_mask.astype(bool)
        return LayerInputs(Blocks(real.reshape(len(real), -1, self.config.block_size)))  # type: ignore[arg-type]

    def layer_fields(self) -> dict[str, Any]:
        """Return the fields of a layer."""
        fields = {"use_bias": self.config.use_bias, "num_random_blocks": self.config.num_random_blocks}
        return {**super().layer_fields(), "attention_fields": fields}


def _cut(outputs: FlaxBaseModelOutputWithPooling, length: int) -> FlaxBaseModelOutputWithPooling:
    """Return the outputs for the first `length` tokens."""
    states, weights = outputs.hidden_states, outputs.attentions

    def square(each: Any) -> jax.Array:
        whole = each.dense() if isinstance(each, BlockWeights) else each
        return whole[:, :, :length, :length]

    assert outputs.last_hidden_state is not None
    return FlaxBaseModelOutputWithPooling(
        outputs.last_hidden_state[:, :length],
        outputs.pooler_output,
        None if states is None else tuple(state[:, :length] for state in states),
        None if weights is None else tuple(map(square, weights)),
    )


# Heads. All but question answering have a pooler in their checkpoints, whether they use it or not.


class _OnBigBird:
    base_class = BigBirdModule
    base_name = "bert"
    add_pooling_layer: ClassVar[bool] = True


class BigBirdForPreTrainingModule(_OnBigBird, heads.ForPreTraining):
    """`ForPreTraining` on BigBird."""


class BigBirdForMaskedLMModule(_OnBigBird, heads.ForMaskedLM):
    """`ForMaskedLM` on BigBird."""


class BigBirdForSequenceClassificationModule(_OnBigBird, heads.ForSequenceClassificationByDense):
    """`ForSequenceClassificationByDense` on BigBird, with the config's activation."""

    def classifier_activation(self) -> Activation:
        """Return the activation between the two dense layers."""
        return ACTIVATIONS[self.config.hidden_act]


class BigBirdForMultipleChoiceModule(_OnBigBird, heads.ForMultipleChoice):
    """`ForMultipleChoice` on BigBird."""


class BigBirdForTokenClassificationModule(_OnBigBird, heads.ForTokenClassification):
    """`ForTokenClassification` on BigBird."""


class BigBirdForQuestionAnsweringModule(_OnBigBird, heads.HeadModule):
    """Where an answer starts and ends, never in the question, by a feed-forward block on the hidden states."""

    add_pooling_layer: ClassVar[bool] = False

    @nn.compact
    def __call__(
        self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, question_lengths=None, **options
    ):
        """Return two times logits `[batch, length]`.

        `question_lengths` `[batch]` or `[batch, 1]` counts the tokens up to the first separator, by default found by
        `sep_token_id`. Without token types, those of the question are 0 and all others 1.
        """
        config = self.config
        if question_lengths is None:
            question_lengths = jnp.argmax(input_ids == config.sep_token_id, axis=1) + 1
        place = jax.lax.broadcasted_iota(jnp.int32, input_ids.shape, 1)
        question = place < question_lengths.reshape(-1, 1)  # [batch, length]
        if token_type_ids is None:
            token_type_ids = (~question).astype(jnp.int32)
        outputs = self.base()(input_ids, attention_mask, token_type_ids, position_ids, **options)
        logits = self.answer_logits(outputs.last_hidden_state, options)  # [batch, length, 2]
        # The first token stands for "no answer".
        logits = logits - _QUESTION_PENALTY * (question & (place > 0))[..., None]
        return self.output(logits, outputs)

    def answer_logits(self, hidden: jax.Array, options: dict[str, Any]) -> jax.Array:
        """Return `[batch, length, 2]` for `hidden` `[batch, length, embed]`."""
        config = self.config
        deterministic = options.get("deterministic", True)
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        fields = (config.intermediate_size, config.hidden_act, config.initializer_range)

        def dropout(values: jax.Array) -> jax.Array:
            return Dropout(config.hidden_dropout_prob)(values, deterministic=deterministic)

        inner = dropout(MLP(*fields, **dtypes, name="qa_mlp")(dropout(hidden)))
        normed = LayerNorm(eps=config.layer_norm_eps, **dtypes, name="qa_norm")(inner + hidden)
        return self.dense(2, "qa_outputs")(normed)

    def output(self, logits: jax.Array, outputs: FlaxBaseModelOutputWithPooling) -> Any:
        """Return what the head says."""
        return FlaxQuestionAnsweringModelOutput(
            logits[..., 0], logits[..., 1], outputs.hidden_states, outputs.attentions
        )


class BigBirdForNaturalQuestionsModule(BigBirdForQuestionAnsweringModule):
    """Question answering, and which of five kinds the answer is of, from the pooled first token."""

    add_pooling_layer: ClassVar[bool] = True

    def output(self, logits: jax.Array, outputs: FlaxBaseModelOutputWithPooling) -> FlaxNaturalQuestionsOutput:
        """Return what the head says."""
        category = self.dense(_CATEGORIES, "cls")(outputs.pooler_output)
        return FlaxNaturalQuestionsOutput(
            logits[..., 0], logits[..., 1], category, outputs.hidden_states, outputs.attentions
        )


# Rows.


def big_bird_rows(config, *, pooler: bool = True) -> list[Row]:
    """Rows of the base model."""
    rows = bert_rows(config, pooler=False)
    if not config.use_bias:
        rows = [row for row in rows if not row.key.endswith(("query.bias", "key.bias", "value.bias"))]
    return rows + (linear("pooler", "pooler/dense", ("embed", None), required=False) if pooler else [])


def _question_answering_rows(config) -> list[Row]:
    head = "qa_classifier"
    return [
        *linear(f"{head}.intermediate.dense", "qa_mlp/up", ("embed", "mlp"), required=False),
        *linear(f"{head}.output.dense", "qa_mlp/down", ("mlp", "embed"), required=False),
        *norm(f"{head}.output.LayerNorm", "qa_norm", required=False),
        *linear(f"{head}.qa_outputs", "qa_outputs", ("embed", None), required=False),
    ]


# Public names.


class FlaxBigBirdPreTrainedModel(FlaxBertPreTrainedModel):
    """What the BigBird classes share."""

    config_class: ClassVar[Any] = BigBirdConfig

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_fields(config, consumed=_CONSUMED, allowed=_ALLOWED)
        check_activation(config.hidden_act)
        check_heads(config.hidden_size, config.num_attention_heads)
        for name, least in (("block_size", 1), ("num_random_blocks", 0)):
            if getattr(config, name) < least:
                raise ConfigError(f"{name}={getattr(config, name)}: it must be at least {least}.")

    @classmethod
    def base_rows(cls, config, *, pooler: bool = True) -> list[Row]:
        """Rows of the whole base model, without its prefix."""
        return big_bird_rows(config, pooler=pooler)


class FlaxBigBirdModel(FlaxBigBirdPreTrainedModel):
    """The encoder: hidden states, and the pooled first token."""

    module_class = BigBirdModule


class FlaxBigBirdForPreTraining(FlaxBigBirdPreTrainedModel):
    """Masked language modeling and next sentence prediction."""

    module_class = BigBirdForPreTrainingModule
    accepts_masked_positions = True
    head_rows = staticmethod(FlaxBertForPreTraining.head_rows)
    ties = FlaxBertForMaskedLM.ties


class FlaxBigBirdForMaskedLM(FlaxBigBirdPreTrainedModel):
    """Masked language modeling."""

    module_class = BigBirdForMaskedLMModule
    accepts_masked_positions = True
    head_rows = staticmethod(FlaxBertForMaskedLM.head_rows)
    ties = FlaxBertForMaskedLM.ties


class FlaxBigBirdForSequenceClassification(FlaxBigBirdPreTrainedModel):
    """Classification or regression of texts and pairs of texts."""

    module_class = BigBirdForSequenceClassificationModule
    head_rows = staticmethod(dense_classification_rows)


class FlaxBigBirdForMultipleChoice(FlaxBigBirdPreTrainedModel):
    """Choice among several continuations; inputs are `[batch, choices, length]`."""

    module_class = BigBirdForMultipleChoiceModule
    input_rank = 3
    head_rows = staticmethod(lambda config: new_linear("classifier"))
    dummy_inputs = FlaxBertForMultipleChoice.dummy_inputs


class FlaxBigBirdForTokenClassification(FlaxBigBirdPreTrainedModel):
    """Classification of each token."""

    module_class = BigBirdForTokenClassificationModule
    head_rows = staticmethod(lambda config: new_linear("classifier"))


class FlaxBigBirdForQuestionAnswering(FlaxBigBirdPreTrainedModel):
    """Extractive question answering; takes `question_lengths` `[batch]` too."""

    module_class: ClassVar[Any] = BigBirdForQuestionAnsweringModule
    further_inputs = ("question_lengths",)
    head_rows = staticmethod(_question_answering_rows)


class FlaxBigBirdForNaturalQuestions(FlaxBigBirdForQuestionAnswering):
    """Question answering with the five kinds of answers of Natural Questions (Kwiatkowski et al. 2019)."""

    module_class = BigBirdForNaturalQuestionsModule
    head_rows = staticmethod(lambda config: [*_question_answering_rows(config), *new_linear("cls")])
