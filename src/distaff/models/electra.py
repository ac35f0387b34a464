"""ELECTRA (Clark et al. 2020, https://arxiv.org/abs/2003.10555): BERT with narrow embeddings and other heads."""

from typing import Any, ClassVar

import jax
from flax import linen as nn
from transformers import ElectraConfig

from distaff.models import _encoder_heads as heads
from distaff.models._encoder_heads import dense_classification_rows, new_linear
from distaff.models._family import check_activation, check_fields, check_heads
from distaff.models._outputs import FlaxElectraForPreTrainingOutput
from distaff.models.bert import (
    ALLOWED,
    CONSUMED,
    BertEmbeddings,
    BertModule,
    FlaxBertForMultipleChoice,
    FlaxBertPreTrainedModel,
    bert_rows,
)
from distaff.nn.act import ACTIVATIONS, Activation
from distaff.nn.dropout import Dropout
from distaff.weights import Row, Tie, linear, norm

# What the config means. The summary is that of the multiple-choice head.

_SUMMARY = "summary_type summary_use_proj summary_activation summary_first_dropout summary_last_dropout".split()
_ALLOWED: dict[str, tuple[Any, ...]] = {
    **ALLOWED,
    "summary_type": ("first", "last", "mean", "cls_index"),
    "summary_proj_to_labels": (False, None),
}


# The model.


class ElectraModule(BertModule):
    """BERT whose embeddings are narrower than its layers, and which has no pooler."""

    add_pooling_layer: bool = False

    def embed(self, input_ids, token_type_ids, position_ids, *, deterministic: bool) -> jax.Array:
        """Return what goes into the stack, `[batch, length, embed]`."""
        config = self.config
        embeddings = BertEmbeddings(config, config.embedding_size, **self.dtypes, name="embeddings")
        narrow = embeddings(input_ids, token_type_ids, position_ids, deterministic=deterministic)
        if config.embedding_size == config.hidden_size:
            return narrow
        init = nn.initializers.normal(config.initializer_range)
        return nn.Dense(config.hidden_size, kernel_init=init, **self.dtypes, name="embeddings_project")(narrow)


# Heads.


class _OnElectra:
    base_class = ElectraModule
    base_name = "electra"


class ElectraForMaskedLMModule(_OnElectra, heads.ForMaskedLM):
    """The generator: `ForMaskedLM` whose head is as narrow as the embeddings that it is tied to."""

    lm_activation: ClassVar[str | None] = "gelu"  # in PyTorch too, whatever hidden_act is

    def lm_features(self) -> int:
        """Return the width of what is projected to the vocabulary."""
        return self.config.embedding_size


class ElectraForPreTrainingModule(_OnElectra, heads.HeadModule):
    """The discriminator: whether each token was replaced."""

    @nn.compact
    def __call__(self, *inputs, **options) -> FlaxElectraForPreTrainingOutput:
        """Return logits `[batch, length]`, positive where a token is likely a replacement."""
        outputs = self.base()(*inputs, **options)
        hidden = outputs.last_hidden_state
        hidden = ACTIVATIONS[self.config.hidden_act](self.dense(hidden.shape[-1], "discriminator_dense")(hidden))
        logits = self.dense(1, "discriminator_out")(hidden)[..., 0]
        return FlaxElectraForPreTrainingOutput(logits, outputs.hidden_states, outputs.attentions)


class ElectraForSequenceClassificationModule(_OnElectra, heads.ForSequenceClassificationByDense):
    """`ForSequenceClassificationByDense` on ELECTRA, with its GELU."""

    def classifier_activation(self) -> Activation:
        """Return the activation between the two dense layers."""
        return ACTIVATIONS["gelu"]


class ElectraForMultipleChoiceModule(_OnElectra, heads.ForMultipleChoice):
    """`ForMultipleChoice` on ELECTRA, which scores a summary that the config describes."""

    add_pooling_layer = False

    def summary(self, outputs, options: dict[str, Any]) -> jax.Array:
        """Return what is scored of each text, `[batch * choices, embed]`."""
        config, hidden = self.config, outputs.last_hidden_state
        if config.summary_type == "mean":
            summary = hidden.mean(axis=1)
        else:  # without an index given, "cls_index" is the last token
            summary = hidden[:, 0 if config.summary_type == "first" else -1]

        def dropout(name: str, values: jax.Array) -> jax.Array:
            rate = getattr(config, name, None) or 0.0
            return Dropout(rate)(values, deterministic=options.get("deterministic", True))

        summary = dropout("summary_first_dropout", summary)
        if config.summary_use_proj:
            summary = self.dense(config.hidden_size, "summary")(summary)
        if config.summary_activation:
            summary = ACTIVATIONS[config.summary_activation](summary)
        return dropout("summary_last_dropout", summary)


class ElectraForTokenClassificationModule(_OnElectra, heads.ForTokenClassification):
    """`ForTokenClassification` on ELECTRA."""


class ElectraForQuestionAnsweringModule(_OnElectra, heads.ForQuestionAnswering):
    """`ForQuestionAnswering` on ELECTRA."""


# Rows of the heads, and of what the base has beside BERT's.


def _generator_rows(config) -> list[Row]:
    rows = [
        *linear("generator_predictions.dense", "lm_head/dense", ("embed", None), required=False),
        *norm("generator_predictions.LayerNorm", "lm_head/norm", required=False),
        Row("generator_lm_head.bias", "lm_head/bias", "bias", ("vocab",), required=False),
    ]
    if not config.tie_word_embeddings:
        rows += linear("generator_lm_head", "lm_head/decoder", ("embed", "vocab"), bias=False, required=False)
    return rows


def _discriminator_rows(config) -> list[Row]:
    head = "discriminator_predictions"
    return [
        *linear(f"{head}.dense", "discriminator_dense", ("embed", None), required=False),
        *linear(f"{head}.dense_prediction", "discriminator_out", ("embed", None), required=False),
    ]


def _multiple_choice_rows(config) -> list[Row]:
    summary = linear("sequence_summary.summary", "summary", ("embed", None), required=False)
    return [*(summary if config.summary_use_proj else []), *new_linear("classifier")]


# Public names.


class FlaxElectraPreTrainedModel(FlaxBertPreTrainedModel):
    """What the ELECTRA classes share."""

    config_class: ClassVar[Any] = ElectraConfig
    base_model_prefix = "electra"

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_fields(config, consumed={*CONSUMED, "embedding_size", *_SUMMARY}, allowed=_ALLOWED)
        check_activation(config.hidden_act)
        if config.summary_activation:
            check_activation(config.summary_activation, "summary_activation")
        check_heads(config.hidden_size, config.num_attention_heads)

    @classmethod
    def base_rows(cls, config, *, pooler: bool = False) -> list[Row]:
        """Rows of the whole base model, without its prefix."""
        rows = bert_rows(config, pooler=pooler)
        if config.embedding_size != config.hidden_size:
            rows += linear("embeddings_project", "embeddings_project", ("embed", None))
        return rows


class FlaxElectraModel(FlaxElectraPreTrainedModel):
    """The encoder: hidden states."""

    module_class = ElectraModule


class FlaxElectraForPreTraining(FlaxElectraPreTrainedModel):
    """The discriminator: whether each token was replaced."""

    module_class = ElectraForPreTrainingModule
    head_rows = staticmethod(_discriminator_rows)


class FlaxElectraForMaskedLM(FlaxElectraPreTrainedModel):
    """The generator: masked language modeling."""

    module_class = ElectraForMaskedLMModule
    accepts_masked_positions = True
    head_rows = staticmethod(_generator_rows)

    @classmethod
    def ties(cls, config) -> tuple[Tie, ...]:
        """The decoder repeats the word embeddings."""
        return (Tie("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),)


class FlaxElectraForSequenceClassification(FlaxElectraPreTrainedModel):
    """Classification or regression of texts and pairs of texts."""

    module_class = ElectraForSequenceClassificationModule
    further_inputs = ("first_tokens",)
    head_rows = staticmethod(dense_classification_rows)


class FlaxElectraForMultipleChoice(FlaxElectraPreTrainedModel):
    """Choice among several continuations; inputs are `[batch, choices, length]`."""

    module_class = ElectraForMultipleChoiceModule
    input_rank = 3
    head_rows = staticmethod(_multiple_choice_rows)
    dummy_inputs = FlaxBertForMultipleChoice.dummy_inputs


class FlaxElectraForTokenClassification(FlaxElectraPreTrainedModel):
    """Classification of each token."""

    module_class = ElectraForTokenClassificationModule
    head_rows = staticmethod(lambda config: new_linear("classifier"))


class FlaxElectraForQuestionAnswering(FlaxElectraPreTrainedModel):
    """Extractive question answering."""

    module_class = ElectraForQuestionAnsweringModule
    head_rows = staticmethod(lambda config: new_linear("qa_outputs"))
