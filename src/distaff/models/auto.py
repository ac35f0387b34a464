"""`FlaxAutoModelFor...`: the class that a checkpoint's model type asks for."""

import importlib
import os
from typing import Any, ClassVar

from distaff.core.errors import CheckpointError, UsageError, listed
from distaff.hub import resolve
from distaff.loading import config_values
from distaff.models import FAMILIES


class _AutoModel:
    """Chooses among the families those that have the head; holds nothing itself."""

    heads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any):
        name = type(self).__name__
        raise UsageError(
            f"{name} is not made directly: use {name}.from_pretrained(name) or {name}.from_config(config)."
        )

    @classmethod
    def for_model_type(cls, model_type: str):
        """Return the class for a config's `model_type`. Raises `UsageError` where there is none."""
        family = FAMILIES.get(model_type)
        head = next((head for head in cls.heads if family and head in family.heads), None)
        if family is None or head is None:
            able = [name for name, other in FAMILIES.items() if set(cls.heads) & set(other.heads)]
            raise UsageError(f"{cls.__name__} has no class for model type '{model_type}': it has {listed(able)}.")
        return getattr(importlib.import_module(f"distaff.models.{family.file}"), family.classes()[head])

    @classmethod
    def from_config(cls, config, **kwargs: Any):
        """Return a model with random weights; keywords as those of `FlaxPreTrainedModel`."""
        return cls.for_model_type(config.model_type)(config, **kwargs)

    @classmethod
    def from_pretrained(cls, name_or_dir, *, config=None, **kwargs: Any):
        """Load a checkpoint; keywords as those of `FlaxPreTrainedModel.from_pretrained`."""
        if config is not None and not isinstance(config, str | os.PathLike):
            return cls.for_model_type(config.model_type).from_pretrained(name_or_dir, config=config, **kwargs)
        where = {
            name: kwargs[name] for name in ("revision", "token", "subfolder", "local_files_only") if name in kwargs
        }
        folder = resolve(config or name_or_dir, weights=False, **({} if config else where))
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"'{folder}' has no config.json, which says what model this is.")
        values = config_values(folder)
        if "model_type" not in values:
            raise CheckpointError(
                f"'{folder / 'config.json'}' does not say its model_type: load it with the class of its family, "
                "such as FlaxBertModel."
            )
        return cls.for_model_type(values["model_type"]).from_pretrained(name_or_dir, config=config, **kwargs)


class FlaxAutoModel(_AutoModel):
    """The base model."""

    heads = ("Model",)


class FlaxAutoModelForPreTraining(_AutoModel):
    """The model with the heads that it was pretrained with."""

    heads = ("ForPreTraining", "ForMaskedLM", "ForCausalLM", "ForConditionalGeneration")


class FlaxAutoModelForMaskedLM(_AutoModel):
    """Masked language modeling."""

    heads = ("ForMaskedLM",)


class FlaxAutoModelForCausalLM(_AutoModel):
    """Causal language modeling."""

    heads = ("ForCausalLM",)


class FlaxAutoModelForSeq2SeqLM(_AutoModel):
    """Writing a text from another."""

    heads = ("ForConditionalGeneration",)


class FlaxAutoModelForNextSentencePrediction(_AutoModel):
    """Next sentence prediction."""

    heads = ("ForNextSentencePrediction",)


class FlaxAutoModelForSequenceClassification(_AutoModel):
    """Classification of texts."""

    heads = ("ForSequenceClassification",)


class FlaxAutoModelForMultipleChoice(_AutoModel):
    """Choice among several continuations."""

    heads = ("ForMultipleChoice",)


class FlaxAutoModelForTokenClassification(_AutoModel):
    """Classification of tokens."""

    heads = ("ForTokenClassification",)


class FlaxAutoModelForImageClassification(_AutoModel):
    """Classification of images."""

    heads = ("ForImageClassification",)


class FlaxAutoModelForQuestionAnswering(_AutoModel):
    """Extractive question answering."""

    heads = ("ForQuestionAnswering",)
