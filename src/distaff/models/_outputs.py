"""What models return: pytrees with access by attribute, key, index and as a tuple."""

from dataclasses import dataclass, fields
from typing import Any, dataclass_transform

import jax

from distaff.nn.cache import Cache
from distaff.nn.vocabulary import Projection

Array = jax.Array
# Logits, or with `lazy_logits` what computes them.
Logits = jax.Array | Projection


@dataclass_transform(frozen_default=True)
class ModelOutput:
    """A dataclass whose fields that are None do not count: `out.logits`, `out["logits"]`, `out[0]`, `tuple(out)`."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True)(cls)
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])

    def keys(self) -> tuple[str, ...]:
        """Names of the fields that are given."""
        names = (field.name for field in fields(self))  # type: ignore[arg-type]
        return tuple(name for name in names if getattr(self, name) is not None)

    def values(self) -> tuple[Any, ...]:
        """Values of the fields that are given."""
        return tuple(getattr(self, name) for name in self.keys())

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Names and values of the fields that are given."""
        return tuple((name, getattr(self, name)) for name in self.keys())

    def to_tuple(self) -> tuple[Any, ...]:
        """Values of the fields that are given."""
        return self.values()

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.values()[key]
        if key not in self.keys():
            raise KeyError(f"{type(self).__name__} holds {', '.join(self.keys())}, not '{key}'.")
        return getattr(self, key)

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def __iter__(self):
        return iter(self.values())

    def __len__(self) -> int:
        return len(self.keys())


class FlaxBaseModelOutputWithPooling(ModelOutput):
    """`last_hidden_state` `[batch, length, embed]`, `pooler_output` `[batch, embed]`.

    `hidden_states`: the embeddings and each layer's output; `attentions`: `[batch, heads, queries, keys]` a layer.
    """

    last_hidden_state: Array | None = None
    pooler_output: Array | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


class FlaxBaseModelOutputWithPoolingAndNoAttention(ModelOutput):
    """`last_hidden_state` `[batch, channels, height, width]`, `pooler_output` `[batch, channels, 1, 1]`.

    `hidden_states`: the stem's output and each stage's.
    """

    last_hidden_state: Array | None = None
    pooler_output: Array | None = None
    hidden_states: tuple[Array, ...] | None = None


class FlaxImageClassifierOutputWithNoAttention(ModelOutput):
    """`logits` `[batch, num_labels]`; `hidden_states`: the stem's output and each stage's."""

    logits: Array | None = None
    hidden_states: tuple[Array, ...] | None = None


class _Logits(ModelOutput):
    logits: Logits | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


class FlaxMaskedLMOutput(_Logits):
    """`logits` `[batch, length, vocab]`, or `[batch, count, vocab]` at the masked positions asked for."""


class FlaxCausalLMOutput(_Logits):
    """`logits` `[batch, length, vocab]`."""


class FlaxBaseModelOutputWithPast(ModelOutput):
    """`last_hidden_state` `[batch, length, embed]`, and `past_key_values`, the cache with this call's tokens in it."""

    last_hidden_state: Array | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


class FlaxCausalLMOutputWithPast(ModelOutput):
    """`logits` `[batch, length, vocab]`, and `past_key_values`, the cache with this call's tokens in it."""

    logits: Logits | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


class FlaxNextSentencePredictorOutput(_Logits):
    """`logits` `[batch, 2]`: the second sentence follows the first, or is a random one."""


class FlaxSequenceClassifierOutput(_Logits):
    """`logits` `[batch, num_labels]`, of texts or images."""


class FlaxMultipleChoiceModelOutput(_Logits):
    """`logits` `[batch, choices]`."""


class FlaxTokenClassifierOutput(_Logits):
    """`logits` `[batch, length, num_labels]`."""


class FlaxElectraForPreTrainingOutput(_Logits):
    """`logits` `[batch, length]`: positive where a token is likely a replacement."""


class FlaxForPreTrainingOutput(ModelOutput):
    """`prediction_logits` `[batch, length, vocab]`, `seq_relationship_logits` `[batch, 2]`."""

    prediction_logits: Logits | None = None
    seq_relationship_logits: Array | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


class FlaxQuestionAnsweringModelOutput(ModelOutput):
    """`start_logits` and `end_logits`, each `[batch, length]`."""

    start_logits: Array | None = None
    end_logits: Array | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


class FlaxBaseModelOutput(ModelOutput):
    """`last_hidden_state` `[batch, length, embed]`; the rest as in `FlaxBaseModelOutputWithPooling`."""

    last_hidden_state: Array | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


class FlaxBaseModelOutputWithPastAndCrossAttentions(ModelOutput):
    """`last_hidden_state` `[batch, length, embed]` of a decoder, and the cache with this call's tokens in it.

    `cross_attentions`: `[batch, heads, queries, source keys]` a layer.
    """

    last_hidden_state: Array | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None
    cross_attentions: tuple[Array, ...] | None = None


class FlaxCausalLMOutputWithCrossAttentions(ModelOutput):
    """`logits` `[batch, length, vocab]` of a decoder, and the cache with this call's tokens in it."""

    logits: Logits | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None
    cross_attentions: tuple[Array, ...] | None = None


class _States(ModelOutput):
    decoder_hidden_states: tuple[Array, ...] | None = None
    decoder_attentions: tuple[Array, ...] | None = None
    cross_attentions: tuple[Array, ...] | None = None
    encoder_last_hidden_state: Array | None = None
    encoder_hidden_states: tuple[Array, ...] | None = None
    encoder_attentions: tuple[Array, ...] | None = None

    def states(self) -> dict[str, Any]:
        """Return what every output of an encoder-decoder holds, by name."""
        return {field.name: getattr(self, field.name) for field in fields(_States)}


class _Last(ModelOutput):
    last_hidden_state: Array | None = None


class _OnlyLogits(ModelOutput):
    logits: Logits | None = None


class _Span(ModelOutput):
    start_logits: Array | None = None
    end_logits: Array | None = None


# Fields of the last base come first.


class FlaxSeq2SeqModelOutput(_States, _Last):
    """`last_hidden_state` `[batch, length, embed]` of the decoder, `encoder_last_hidden_state`, and both's states.

    `cross_attentions`: `[batch, heads, queries, source keys]` a layer.
    """


class FlaxSeq2SeqLMOutput(_States, _OnlyLogits):
    """`logits` `[batch, length, vocab]`; the rest as in `FlaxSeq2SeqModelOutput`."""


class FlaxSeq2SeqSequenceClassifierOutput(_States, _OnlyLogits):
    """`logits` `[batch, num_labels]`; the rest as in `FlaxSeq2SeqModelOutput`."""


class FlaxSeq2SeqQuestionAnsweringModelOutput(_States, _Span):
    """`start_logits` and `end_logits`, each `[batch, length]`; the rest as in `FlaxSeq2SeqModelOutput`."""


class FlaxNaturalQuestionsOutput(ModelOutput):
    """`start_logits` and `end_logits`, each `[batch, length]`, and `category_logits` `[batch, 5]`."""

    start_logits: Array | None = None
    end_logits: Array | None = None
    category_logits: Array | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None
