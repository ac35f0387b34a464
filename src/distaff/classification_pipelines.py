"""text-classification and zero-shot-classification: which class a text, or a pair of texts, is of."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.labelled import has_types
from distaff.models.auto import FlaxAutoModelForSequenceClassification
from distaff.pipeline_base import TextPipeline, answers, check_characters

_FUNCTIONS = ("softmax", "sigmoid", "none")
# Only the best one, and not in a list.
_BEST = "best"


class _Classifier(TextPipeline):
    """What both have: logits of texts and of pairs."""

    auto_class = FlaxAutoModelForSequenceClassification

    def logits(self, texts: Sequence[tuple[str, str | None]], *, truncation: bool | str) -> list[np.ndarray]:
        """Return for each text, and what stands beside it, `[labels]` float32.

        Raises `DataError` for one that is longer than the model, unless `truncation` says what is cut.
        """
        types = has_types(self.tokenizer, self.model.config)
        options = {"return_attention_mask": False, "return_token_type_ids": types}
        rows = []
        for text, beside in texts:
            row = self.tokenizer(text, beside, verbose=False, **options)
            count = len(row["input_ids"])
            if self.longest_input is not None and count > self.longest_input:
                if not truncation:
                    raise self.too_long(text, count)
                self._check_room(beside, truncation)
                row = self.tokenizer(text, beside, truncation=truncation, max_length=self.longest_input, **options)
            rows.append({name: row[name] for name in ("input_ids", "token_type_ids") if name in row})
        return self.outputs(rows, "logits", of_tokens=False)

    def _check_room(self, beside: str | None, truncation: bool | str) -> None:
        """Raise `DataError` where the text alone is to be cut, and what stands beside it leaves no room for it."""
        if beside is None or truncation != "only_first":
            return
        tokens = len(self.tokenizer(beside, add_special_tokens=False, verbose=False)["input_ids"])
        if tokens + self.tokenizer.num_special_tokens_to_add(pair=True) >= self.longest_input:
            raise DataError(
                f"The hypothesis {beside[:40]!r} of {tokens} tokens leaves no room for a text in the "
                f"{self.longest_input} of the model: shorten the label."
            )


class TextClassificationPipeline(_Classifier):
    """Says of which class a text is, or which number it has.

    top_k: how many classes, best first, None for all; without it the best one alone. function_to_apply: "softmax",
    "sigmoid" or "none", by default as the config's problem_type says. truncation: cut what is longer than the model.
    """

    task = "text-classification"
    options: ClassVar[Mapping[str, Any]] = {"top_k": _BEST, "function_to_apply": None, "truncation": False}

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return `{"label", "score"}` for each text, or lists of these with `top_k`.

        An input is a text, or `{"text": ..., "text_pair": ...}`. For one text without `top_k` in the call there is a
        list of one answer, as in Transformers.
        """
        if "batch_size" in options:
            return self.resized(options.pop("batch_size"))(inputs, **options)
        given = {**self.settings, **self.checked(options)}
        if given["top_k"] not in (None, _BEST) and given["top_k"] < 1:
            raise UsageError(f"top_k is {given['top_k']}: it must be at least 1, or None for all classes.")
        if given["function_to_apply"] not in (None, *_FUNCTIONS):
            raise UsageError(f"function_to_apply '{given['function_to_apply']}' is none of {listed(_FUNCTIONS)}.")

        def many(texts: list[Any]) -> list[Any]:
            pairs = [_pair(number, text) for number, text in enumerate(texts)]
            return [self._answer(row, given) for row in self.logits(pairs, truncation=given["truncation"])]

        found = answers(inputs, many, one=(str, Mapping), held=self.batch_size)
        return [found] if isinstance(inputs, str) and "top_k" not in options else found

    def _answer(self, logits: np.ndarray, given: Mapping[str, Any]) -> Any:
        names, top_k = self.model.config.id2label, given["top_k"]
        scores = _scores(logits, given["function_to_apply"] or self._function())
        ranked = np.argsort(-scores, kind="stable")
        every = [{"label": names[int(index)], "score": float(scores[index])} for index in ranked]
        return every[0] if top_k == _BEST else every[:top_k]

    def _function(self) -> str:
        config = self.model.config
        if config.problem_type == "regression":
            return "none"
        several = config.problem_type == "multi_label_classification" or config.num_labels == 1
        return "sigmoid" if several else "softmax"


class ZeroShotClassificationPipeline(_Classifier):
    """Says which of any labels fits a text, by a model that tells whether one sentence follows from another.

    hypothesis_template: the sentence that is judged, with {} for a label. multi_label: each label by itself, with or
    without others. A text that is too long is cut, and never the label.
    """

    task = "zero-shot-classification"
    options: ClassVar[Mapping[str, Any]] = {
        "candidate_labels": None,
        "hypothesis_template": "This example is {}.",
        "multi_label": False,
    }

    def __init__(self, model: Any, **settings: Any):
        super().__init__(model, **settings)
        labels = self.model.config.label2id
        entailment = [index for name, index in labels.items() if name.lower().startswith("entail")]
        if len(labels) < 2 or not entailment:
            raise UsageError(
                f"zero-shot-classification needs a model of entailment, and this one has the classes {listed(labels)}."
            )
        self.entailment = entailment[0]

    def __call__(self, inputs: Any, candidate_labels: str | Sequence[str] | None = None, **options: Any) -> Any:
        """Return `{"sequence", "labels", "scores"}` for each text, the best label first.

        `candidate_labels` are a list, or names with commas between them.
        """
        if "batch_size" in options:
            return self.resized(options.pop("batch_size"))(inputs, candidate_labels, **options)
        given = {**self.settings, **self.checked(options)}
        labels = given["candidate_labels"] if candidate_labels is None else candidate_labels
        if isinstance(labels, str):
            labels = [label.strip() for label in labels.split(",") if label.strip()]
        if not labels:
            raise UsageError("zero-shot-classification needs candidate_labels: name them.")
        for number, label in enumerate(labels):
            check_characters(str(label), f"Label {number}")
        template = _template(given["hypothesis_template"])

        def many(texts: list[Any]) -> list[Any]:
            pairs = [_pair(number, text) for number, text in enumerate(texts)]
            asked = [(text, template.format(label)) for text, _ in pairs for label in labels]
            logits, count = self.logits(asked, truncation="only_first"), len(labels)
            rows = [np.stack(logits[start : start + count]) for start in range(0, len(logits), count)]
            return [self._answer(text, labels, row, given["multi_label"]) for text, row in zip(texts, rows)]

        return answers(inputs, many, one=str, held=self.batch_size)

    def _answer(self, text: str, labels: Sequence[str], logits: np.ndarray, multi_label: bool) -> dict[str, Any]:
        if multi_label or len(labels) == 1:
            # As Transformers: contradiction is the first class, or the last where entailment is the first.
            against = -1 if self.entailment == 0 else 0
            scores = _scores(logits[:, [against, self.entailment]], "softmax")[:, 1]
        else:
            scores = _scores(logits[:, self.entailment], "softmax")
        order = np.argsort(-scores, kind="stable")
        return {
            "sequence": text,
            "labels": [labels[index] for index in order],
            "scores": [float(scores[index]) for index in order],
        }


def _template(text: str) -> str:
    """Return a sentence with a place for a label. Raises `UsageError` for one without, or with another."""
    try:
        if text.format("") != text.format("label"):
            return text
    except (IndexError, KeyError, ValueError):
        pass
    raise UsageError(f"hypothesis_template '{text}' must have one {{}}, where a label belongs, and no other braces.")


def _pair(number: int, given: Any) -> tuple[str, str | None]:
    """Return the two texts of an input. Raises `DataError` for what is none."""
    parts = {"text": given} if isinstance(given, str) else given
    known = isinstance(parts, Mapping) and "text" in parts and parts.keys() <= {"text", "text_pair"}
    if not known or not all(isinstance(part, str) for part in parts.values()):
        raise DataError(
            f"Input {number} ({str(given)[:40]!r}) is neither a text nor {{'text': ..., 'text_pair': ...}}."
        )
    for part in parts.values():
        check_characters(part, f"Input {number}")
    return parts["text"], parts.get("text_pair")


def _scores(logits: np.ndarray, function: str) -> np.ndarray:
    """Apply `function` over the last axis."""
    if function == "none":
        return logits
    if function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)
