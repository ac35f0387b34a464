"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692) and XLM-RoBERTa: BERT with other positions and heads."""

from typing import Any, ClassVar

import jax
from flax import linen as nn
from transformers import RobertaConfig, XLMRobertaConfig

from distaff.core.errors import ConfigError
from distaff.models import _encoder_heads as heads
from distaff.models._encoder_heads import dense_classification_rows, lm_head_rows, new_linear
from distaff.models._outputs import FlaxCausalLMOutput
from distaff.models.bert import BertModule, FlaxBertForMultipleChoice, FlaxBertPreTrainedModel
from distaff.nn.embed import positions_after_padding
from distaff.weights import Row, Tie

# The model.


class RobertaModule(BertModule):
    """BERT whose positions start after the padding id, and whose padding has the padding id as position."""

    def default_positions(self, input_ids: jax.Array) -> jax.Array:
        """Return `[batch, length]`, counted over tokens that are not padding."""
        return positions_after_padding(input_ids, self.config.pad_token_id)

    @staticmethod
    def longest(config) -> int:
        """Return the greatest length for which there are positions."""
        return config.max_position_embeddings - config.pad_token_id - 1


# Heads.


class _OnRoberta:
    base_class = RobertaModule
    base_name = "roberta"
    lm_activation: ClassVar[str | None] = "gelu"  # fairseq's LM head, whatever hidden_act is


class RobertaForMaskedLMModule(_OnRoberta, heads.ForMaskedLM):
    """`ForMaskedLM` on RoBERTa."""


class RobertaForMultipleChoiceModule(_OnRoberta, heads.ForMultipleChoice):
    """`ForMultipleChoice` on RoBERTa."""


class RobertaForTokenClassificationModule(_OnRoberta, heads.ForTokenClassification):
    """`ForTokenClassification` on RoBERTa."""


class RobertaForQuestionAnsweringModule(_OnRoberta, heads.ForQuestionAnswering):
    """`ForQuestionAnswering` on RoBERTa."""


class RobertaForCausalLMModule(_OnRoberta, heads.HeadModule):
    """Vocabulary logits of the next token; attention is causal where the config says `is_decoder`."""

    @nn.compact
    def __call__(self, *inputs, lazy_logits: bool = False, **options) -> FlaxCausalLMOutput:
        """Return logits `[batch, length, vocab]`."""
        base = self.base()
        outputs = base(*inputs, **options)
        logits = self.vocabulary_logits(base, outputs.last_hidden_state, lazy=lazy_logits)
        return FlaxCausalLMOutput(logits, outputs.hidden_states, outputs.attentions)


class RobertaForSequenceClassificationModule(_OnRoberta, heads.ForSequenceClassificationByDense):
    """`ForSequenceClassificationByDense` on RoBERTa."""


# Rows of the heads; those of the base are BERT's.


def _lm_head_rows(config) -> list[Row]:
    return lm_head_rows(config, "lm_head.dense", "lm_head.layer_norm", "lm_head")


# Public names.


class FlaxRobertaPreTrainedModel(FlaxBertPreTrainedModel):
    """What the RoBERTa classes share."""

    config_class: ClassVar[Any] = RobertaConfig
    compatible_model_types: ClassVar[tuple[str, ...]] = ("xlm-roberta", "camembert")
    base_model_prefix = "roberta"

    @property
    def longest_input(self) -> int:
        """The greatest length of a row, in tokens."""
        return RobertaModule.longest(self.config)

    @property
    def first_position(self) -> int:
        """The position of a text's first token."""
        return self.config.pad_token_id + 1

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        super().check_config(config)
        if config.pad_token_id is None:
            raise ConfigError("pad_token_id=None: RoBERTa counts positions from it; set it to the tokenizer's.")


class FlaxRobertaModel(FlaxRobertaPreTrainedModel):
    """The encoder: hidden states, and the pooled first token."""

    module_class = RobertaModule


class FlaxRobertaForMaskedLM(FlaxRobertaPreTrainedModel):
    """Masked language modeling."""

    module_class: ClassVar[Any] = RobertaForMaskedLMModule
    accepts_masked_positions = True
    head_rows = staticmethod(_lm_head_rows)

    @classmethod
    def ties(cls, config) -> tuple[Tie, ...]:
        """The decoder repeats the word embeddings."""
        return (Tie("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),)


class FlaxRobertaForCausalLM(FlaxRobertaForMaskedLM):
    """Causal language modeling."""

    module_class = RobertaForCausalLMModule
    accepts_masked_positions = False


class FlaxRobertaForSequenceClassification(FlaxRobertaPreTrainedModel):
    """Classification or regression of texts and pairs of texts."""

    module_class = RobertaForSequenceClassificationModule
    further_inputs = ("first_tokens",)
    head_rows = staticmethod(dense_classification_rows)


class FlaxRobertaForMultipleChoice(FlaxRobertaPreTrainedModel):
    """Choice among several continuations; inputs are `[batch, choices, length]`."""

    module_class = RobertaForMultipleChoiceModule
    input_rank = 3
    head_rows = staticmethod(lambda config: new_linear("classifier"))
    dummy_inputs = FlaxBertForMultipleChoice.dummy_inputs


class FlaxRobertaForTokenClassification(FlaxRobertaPreTrainedModel):
    """Classification of each token."""

    module_class = RobertaForTokenClassificationModule
    head_rows = staticmethod(lambda config: new_linear("classifier"))


class FlaxRobertaForQuestionAnswering(FlaxRobertaPreTrainedModel):
    """Extractive question answering."""

    module_class = RobertaForQuestionAnsweringModule
    head_rows = staticmethod(lambda config: new_linear("qa_outputs"))


class _Multilingual:
    """XLM-RoBERTa (Conneau et al. 2020, https://arxiv.org/abs/1911.02116): the same model under another model type."""

    config_class: ClassVar[Any] = XLMRobertaConfig
    compatible_model_types: ClassVar[tuple[str, ...]] = ("roberta",)


class FlaxXLMRobertaModel(_Multilingual, FlaxRobertaModel):
    """The encoder: hidden states, and the pooled first token."""


class FlaxXLMRobertaForMaskedLM(_Multilingual, FlaxRobertaForMaskedLM):
    """Masked language modeling."""


class FlaxXLMRobertaForCausalLM(_Multilingual, FlaxRobertaForCausalLM):
    """Causal language modeling."""


class FlaxXLMRobertaForSequenceClassification(_Multilingual, FlaxRobertaForSequenceClassification):
    """Classification or regression of texts and pairs of texts."""


class FlaxXLMRobertaForMultipleChoice(_Multilingual, FlaxRobertaForMultipleChoice):
    """Choice among several continuations; inputs are `[batch, choices, length]`."""


class FlaxXLMRobertaForTokenClassification(_Multilingual, FlaxRobertaForTokenClassification):
    """Classification of each token."""


class FlaxXLMRobertaForQuestionAnswering(_Multilingual, FlaxRobertaForQuestionAnswering):
    """Extractive question answering."""
