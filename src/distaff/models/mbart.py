"""mBART (Liu et al. 2020, https://arxiv.org/abs/2001.08210): BART with norms before, and one behind each stack."""

from typing import Any, ClassVar

from transformers import MBartConfig

from distaff.models import bart
from distaff.models.bart import (
    FlaxBartForConditionalGeneration,
    FlaxBartForQuestionAnswering,
    FlaxBartForSequenceClassification,
    FlaxBartModel,
    FlaxBartPreTrainedModel,
)

# What the config means: as BART's, but for what old configs say of its norms.

ALLOWED = bart.ALLOWED | {"normalize_before": (True,), "add_final_layer_norm": (True,)}


# The model and its heads.


class MBartStack(bart.BartStack):
    """A stack of pre-norm layers."""

    norm_order = "pre"
    final_norm = True


class MBartModule(bart.BartModule):
    """The base model."""

    stack_class = MBartStack


class MBartForConditionalGenerationModule(bart.BartForConditionalGenerationModule):
    """`ForConditionalGeneration` on mBART."""

    base_class = MBartModule


class MBartForSequenceClassificationModule(bart.BartForSequenceClassificationModule):
    """`ForSequenceClassification` on mBART."""

    base_class = MBartModule


class MBartForQuestionAnsweringModule(bart.BartForQuestionAnsweringModule):
    """`ForQuestionAnswering` on mBART."""

    base_class = MBartModule


# Public names.


class FlaxMBartPreTrainedModel(FlaxBartPreTrainedModel):
    """What the mBART classes share."""

    config_class: ClassVar[Any] = MBartConfig
    allowed = ALLOWED
    final_norm = True
    # Its last token is the language, in labels of mBART-50 the end; as in PyTorch, whatever generation starts from.
    wraps_labels = True

    @property
    def decoder_start_token_id(self) -> int | None:
        """The config's; None where each row starts with its language."""
        return self.config.decoder_start_token_id


class FlaxMBartModel(FlaxMBartPreTrainedModel, FlaxBartModel):
    """Encoder and decoder: hidden states."""

    module_class = MBartModule


class FlaxMBartForConditionalGeneration(FlaxMBartPreTrainedModel, FlaxBartForConditionalGeneration):
    """Translations, denoising: logits of the next token."""

    module_class = MBartForConditionalGenerationModule


class FlaxMBartForSequenceClassification(FlaxMBartPreTrainedModel, FlaxBartForSequenceClassification):
    """Classification of texts."""

    module_class = MBartForSequenceClassificationModule


class FlaxMBartForQuestionAnswering(FlaxMBartPreTrainedModel, FlaxBartForQuestionAnswering):
    """Extractive question answering."""

    module_class = MBartForQuestionAnsweringModule
