"""Heads on encoders that BERT, RoBERTa and their descendants share: modules and rows."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.models._outputs import (
    FlaxForPreTrainingOutput,
    FlaxMaskedLMOutput,
    FlaxMultipleChoiceModelOutput,
    FlaxNextSentencePredictorOutput,
    FlaxQuestionAnsweringModelOutput,
    FlaxSequenceClassifierOutput,
    FlaxTokenClassifierOutput,
)
from distaff.nn.act import Activation
from distaff.nn.dropout import Dropout
from distaff.nn.heads import LMHead, first_token, gather_positions
from distaff.nn.vocabulary import Projection
from distaff.resizing import vocab_rows
from distaff.weights import Row, linear, norm


class HeadModule(nn.Module):
    """A base model under its prefix, and a head on it."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    # A family sets these; the activation of its LM head is the config's unless named.
    base_class: ClassVar[Any] = None
    base_name: ClassVar[str] = ""
    add_pooling_layer: ClassVar[bool] = False
    lm_activation: ClassVar[str | None] = None

    def base(self) -> nn.Module:
        """Return the base module."""
        return self.base_class(
            self.config,
            self.dtype,
            self.param_dtype,
            self.add_pooling_layer,
            self.gradient_checkpointing,
            self.scan_layers,
            self.attn_implementation,
            name=self.base_name,
        )

    def dense(self, features: int, name: str) -> nn.Dense:
        """Return a dense layer of the head."""
        return nn.Dense(
            features,
            kernel_init=nn.initializers.normal(self.config.initializer_range),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name=name,
        )

    def dropout(self, values: jax.Array, options: dict[str, Any]) -> jax.Array:
        """Drop out at the classifier's rate."""
        config = self.config
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        return Dropout(rate)(values, deterministic=options.get("deterministic", True))

    def lm_features(self) -> int | None:
        """Return the width of what is projected to the vocabulary, None for the hidden size."""
        return None

    def vocabulary_logits(self, base: nn.Module, hidden: jax.Array, *, lazy: bool) -> jax.Array | Projection:
        """Return `[..., vocab]` for `hidden` `[..., embed]`, with the word embeddings where tied.

        With `lazy`, a `Projection` that computes them.
        """
        config = self.config
        tied = None
        if config.tie_word_embeddings:
            tied = base.variables["params"]["embeddings"]["word_embeddings"]["embedding"]
        head = LMHead(
            config.vocab_size,
            self.lm_activation or config.hidden_act,
            config.layer_norm_eps,
            config.initializer_range,
            self.lm_features(),
            self.dtype,
            self.param_dtype,
            vocab_rows(config),
            name="lm_head",
        )
        projection = head(hidden, tied)
        return projection if lazy else projection.logits()


class ForMaskedLM(HeadModule):
    """Vocabulary logits everywhere, or at `masked_positions` `[batch, count]` alone."""

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        masked_positions=None,
        *,
        lazy_logits: bool = False,
        **options,
    ) -> FlaxMaskedLMOutput:
        """Return logits `[batch, length or count, vocab]`."""
        base = self.base()
        outputs = base(input_ids, attention_mask, token_type_ids, position_ids, **options)
        hidden = outputs.last_hidden_state
        if masked_positions is not None:
            hidden = gather_positions(hidden, masked_positions)  # [batch, count, embed]
        logits = self.vocabulary_logits(base, hidden, lazy=lazy_logits)
        return FlaxMaskedLMOutput(logits, outputs.hidden_states, outputs.attentions)


class ForPreTraining(HeadModule):
    """Masked LM, and whether the second sentence follows the first."""

    add_pooling_layer = True

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        masked_positions=None,
        *,
        lazy_logits: bool = False,
        **options,
    ) -> FlaxForPreTrainingOutput:
        """Return logits of both tasks."""
        base = self.base()
        outputs = base(input_ids, attention_mask, token_type_ids, position_ids, **options)
        hidden = outputs.last_hidden_state
        if masked_positions is not None:
            hidden = gather_positions(hidden, masked_positions)  # [batch, count, embed]
        logits = self.vocabulary_logits(base, hidden, lazy=lazy_logits)
        relationship = self.dense(2, "seq_relationship")(outputs.pooler_output)
        return FlaxForPreTrainingOutput(logits, relationship, outputs.hidden_states, outputs.attentions)


class ForNextSentencePrediction(HeadModule):
    """Whether the second sentence follows the first."""

    add_pooling_layer = True

    @nn.compact
    def __call__(self, *inputs, **options) -> FlaxNextSentencePredictorOutput:
        """Return logits `[batch, 2]`."""
        outputs = self.base()(*inputs, **options)
        logits = self.dense(2, "seq_relationship")(outputs.pooler_output)
        return FlaxNextSentencePredictorOutput(logits, outputs.hidden_states, outputs.attentions)


class ForSequenceClassification(HeadModule):
    """A class, or a number, for the whole text; for each of several in a row with `first_tokens` `[batch, texts]`."""

    add_pooling_layer = True

    @nn.compact
    def __call__(self, *inputs, **options) -> FlaxSequenceClassifierOutput:
        """Return logits `[batch, num_labels]`, or `[batch, texts, num_labels]`."""
        outputs = self.base()(*inputs, **options)
        pooled = self.dropout(outputs.pooler_output, options)
        logits = self.dense(self.config.num_labels, "classifier")(pooled)
        return FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class ForSequenceClassificationByDense(HeadModule):
    """A class, or a number, for the whole text, by a dense layer with an activation on the first token.

    With `first_tokens` `[batch, texts]` for each of several texts in a row.
    """

    def classifier_activation(self) -> Activation:
        """Return the activation between the two dense layers."""
        return jnp.tanh

    @nn.compact
    def __call__(self, *inputs, first_tokens=None, **options) -> FlaxSequenceClassifierOutput:
        """Return logits `[batch, num_labels]`, or `[batch, texts, num_labels]`."""
        outputs = self.base()(*inputs, **options)
        first = self.dropout(first_token(outputs.last_hidden_state, first_tokens), options)
        inner = self.classifier_activation()(self.dense(first.shape[-1], "classifier_dense")(first))
        logits = self.dense(self.config.num_labels, "classifier_out")(self.dropout(inner, options))
        return FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class ForMultipleChoice(HeadModule):
    """A score for each of several texts."""

    add_pooling_layer = True

    def summary(self, outputs, options: dict[str, Any]) -> jax.Array:
        """Return what is scored of each text, `[batch * choices, embed]`."""
        return self.dropout(outputs.pooler_output, options)

    @nn.compact
    def __call__(
        self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, **options
    ) -> FlaxMultipleChoiceModelOutput:
        """Return logits `[batch, choices]` for inputs `[batch, choices, length]`."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        rows = [None if each is None else each.reshape(-1, each.shape[-1]) for each in inputs]
        outputs = self.base()(*rows, **options)
        logits = self.dense(1, "classifier")(self.summary(outputs, options))  # [batch * choices, 1]
        return FlaxMultipleChoiceModelOutput(
            logits.reshape(input_ids.shape[:2]), outputs.hidden_states, outputs.attentions
        )


class ForTokenClassification(HeadModule):
    """A class for each token."""

    @nn.compact
    def __call__(self, *inputs, **options) -> FlaxTokenClassifierOutput:
        """Return logits `[batch, length, num_labels]`."""
        outputs = self.base()(*inputs, **options)
        hidden = self.dropout(outputs.last_hidden_state, options)
        logits = self.dense(self.config.num_labels, "classifier")(hidden)
        return FlaxTokenClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class ForQuestionAnswering(HeadModule):
    """Where an answer starts and ends."""

    @nn.compact
    def __call__(self, *inputs, **options) -> FlaxQuestionAnsweringModelOutput:
        """Return two times logits `[batch, length]`."""
        outputs = self.base()(*inputs, **options)
        logits = self.dense(2, "qa_outputs")(outputs.last_hidden_state)  # [batch, length, 2]
        return FlaxQuestionAnsweringModelOutput(
            logits[..., 0], logits[..., 1], outputs.hidden_states, outputs.attentions
        )


def lm_head_rows(config, transform: str, transform_norm: str, head: str) -> list[Row]:
    """Rows of an LM head; PyTorch keeps its bias under two names, of which the decoder's is the one that it uses."""
    fields: dict[str, Any] = {"required": False}
    decoder_bias = f"{head}.decoder.bias"
    copies = () if config.tie_word_embeddings else (decoder_bias,)
    rows = [
        *linear(transform, "lm_head/dense", ("embed", None), **fields),
        *norm(transform_norm, "lm_head/norm", **fields),
        Row(f"{head}.bias", "lm_head/bias", "bias", ("vocab",), aliases=(decoder_bias,), copies=copies, **fields),
    ]
    if not config.tie_word_embeddings:
        rows += linear(f"{head}.decoder", "lm_head/decoder", ("embed", "vocab"), bias=False, **fields)
    return rows


def dense_classification_rows(config) -> list[Row]:
    """Rows of `ForSequenceClassificationByDense`."""
    return [
        *linear("classifier.dense", "classifier_dense", ("embed", None), required=False),
        *linear("classifier.out_proj", "classifier_out", ("embed", None), required=False),
    ]


def new_linear(key: str, axes: tuple[str | None, str | None] = ("embed", None)) -> list[Row]:
    """Rows of a dense layer of a head, which a checkpoint may lack; its path is the last part of `key`."""
    return linear(key, key.rpartition(".")[2], axes, required=False)
