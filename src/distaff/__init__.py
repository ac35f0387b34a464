"""Flax models for Hugging Face checkpoints on today's JAX.

Names are imported when they are first used: `import distaff` loads neither jax nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from distaff.models import FAMILIES, public_names

if TYPE_CHECKING:
    from distaff.core.mesh import make_mesh as make_mesh
    from distaff.models.auto import *  # noqa: F403
    from distaff.models.bart import *  # noqa: F403
    from distaff.models.bert import *  # noqa: F403
    from distaff.models.big_bird import *  # noqa: F403
    from distaff.models.electra import *  # noqa: F403
    from distaff.models.gpt2 import *  # noqa: F403
    from distaff.models.gpt_neo import *  # noqa: F403
    from distaff.models.mbart import *  # noqa: F403
    from distaff.models.opt import *  # noqa: F403
    from distaff.models.resnet import *  # noqa: F403
    from distaff.models.roberta import *  # noqa: F403
    from distaff.models.t5 import *  # noqa: F403
    from distaff.models.vit import *  # noqa: F403
    from distaff.pipelines import pipeline as pipeline
    from distaff.pretrained import FlaxPreTrainedModel as FlaxPreTrainedModel

__version__ = "0.1.0"

# Heads whose automatic class has another name, or none.
_NAMED_OTHERWISE = {"Model", "EncoderModel", "LMHeadModel", "ForConditionalGeneration", "ForNaturalQuestions"}
_AUTO_HEADS = sorted(
    {head for family in FAMILIES.values() for head in family.heads} - _NAMED_OTHERWISE | {"ForSeq2SeqLM"}
)

_HOMES = {
    **public_names(),
    "FlaxPreTrainedModel": "distaff.pretrained",
    "FlaxAutoModel": "distaff.models.auto",
    **{f"FlaxAutoModel{head}": "distaff.models.auto" for head in _AUTO_HEADS},
    "pipeline": "distaff.pipelines",
    "make_mesh": "distaff.core.mesh",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distaff' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
