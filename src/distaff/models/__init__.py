"""One file a family. The registry below is all that the rest of the library knows of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Where a model type's classes stand: `Flax<name><head>` in the module `file`."""

    file: str
    name: str
    heads: tuple[str, ...]

    def classes(self) -> dict[str, str]:
        """Class name by head."""
        return {head: f"Flax{self.name}{head}" for head in self.heads}


_ROBERTA_HEADS = tuple(
    "Model ForMaskedLM ForCausalLM ForSequenceClassification ForMultipleChoice ForTokenClassification "
    "ForQuestionAnswering".split()
)

_T5_HEADS = ("Model", "EncoderModel", "ForConditionalGeneration")
_IMAGE_HEADS = ("Model", "ForImageClassification")
_BART_HEADS = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering")

# By model type of the config. To add a family, add its file and a line here.
FAMILIES: dict[str, Family] = {
    "bart": Family("bart", "Bart", _BART_HEADS),
    "bert": Family(
        "bert",
        "Bert",
        tuple(
            "Model ForPreTraining ForMaskedLM ForNextSentencePrediction ForSequenceClassification ForMultipleChoice "
            "ForTokenClassification ForQuestionAnswering".split()
        ),
    ),
    "big_bird": Family(
        "big_bird",
        "BigBird",
        tuple(
            "Model ForPreTraining ForMaskedLM ForSequenceClassification ForMultipleChoice ForTokenClassification "
            "ForQuestionAnswering ForNaturalQuestions".split()
        ),
    ),
    "electra": Family(
        "electra",
        "Electra",
        tuple(
            "Model ForPreTraining ForMaskedLM ForSequenceClassification ForMultipleChoice ForTokenClassification "
            "ForQuestionAnswering".split()
        ),
    ),
    "roberta": Family("roberta", "Roberta", _ROBERTA_HEADS),
    "gpt2": Family("gpt2", "GPT2", ("Model", "LMHeadModel", "ForCausalLM")),
    "gpt_neo": Family("gpt_neo", "GPTNeo", ("Model", "ForCausalLM")),
    "opt": Family("opt", "OPT", ("Model", "ForCausalLM")),
    "mbart": Family("mbart", "MBart", _BART_HEADS),
    "mt5": Family("t5", "MT5", _T5_HEADS),
    "resnet": Family("resnet", "ResNet", _IMAGE_HEADS),
    "t5": Family("t5", "T5", _T5_HEADS),
    "vit": Family("vit", "ViT", _IMAGE_HEADS),
    "xlm-roberta": Family("roberta", "XLMRoberta", _ROBERTA_HEADS),
}


def public_names() -> dict[str, str]:
    """Return the module of each public class by its name, without importing any."""
    return {name: f"distaff.models.{family.file}" for family in FAMILIES.values() for name in family.classes().values()}
