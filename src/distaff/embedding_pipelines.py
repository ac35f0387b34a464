"""feature-extraction and sentence-similarity: vectors of tokens and of whole texts."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from distaff.core.errors import CheckpointError, DataError, UsageError, listed
from distaff.models.auto import FlaxAutoModel
from distaff.pipeline_base import TextPipeline, answers, check_texts

logger = logging.getLogger(__name__)


class EncodingPipeline(TextPipeline):
    """What both have: texts to rows of ids, and the last hidden states of a model without a head."""

    auto_class = FlaxAutoModel

    def load(self, folder: Path, options: dict[str, Any]) -> Any:
        """Return the model of a folder."""
        model = super().load(folder, options)
        if model.config.is_encoder_decoder:
            raise UsageError(f"'{folder}' is an encoder-decoder, which reads and writes: {self.task} needs an encoder.")
        return model

    def rows(self, texts: list[str], *, limit: int | None, truncation: bool) -> list[dict[str, list[int]]]:
        """Return the ids of texts. Raises `DataError` for one without tokens, or too long without `truncation`."""
        check_texts(texts)
        rows, cut = [], 0
        for number, text in enumerate(texts):
            ids = self.tokenizer(text, verbose=False)["input_ids"]
            if not ids:
                raise DataError(f"Text {number} ({text!r}) has no tokens: write something.")
            if limit is not None and len(ids) > limit:
                if not truncation:
                    raise self.too_long(text, len(ids))
                cut += 1
                ids = self.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
            rows.append({"input_ids": ids})
        if cut:
            logger.warning("%d of %d texts are longer than %d tokens and were cut.", cut, len(texts), limit)
        return rows


class FeatureExtractionPipeline(EncodingPipeline):
    """Gives the last hidden state of each token, special ones among them.

    truncation: cut what is longer than the model. return_tensors: arrays instead of lists.
    """

    task = "feature-extraction"
    options: ClassVar[Mapping[str, Any]] = {"truncation": False, "return_tensors": False}

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return `[1, tokens, embed]` for a text, or such for each of several."""
        if "batch_size" in options:
            return self.resized(options.pop("batch_size"))(inputs, **options)
        options = {**self.settings, **self.checked(options)}

        def many(texts: list[str]) -> list[Any]:
            rows = self.rows(texts, limit=self.longest_input, truncation=options["truncation"])
            found = [values[None] for values in self.outputs(rows, "last_hidden_state")]
            return found if options["return_tensors"] else [values.tolist() for values in found]

        return answers(inputs, many, one=str, held=self.batch_size)


@dataclass(frozen=True)
class SentenceSettings:
    """How sentence-transformers made vectors of this model.

    modes: how the tokens of a text become one vector; several are put one behind the other. normalize: to length 1.
    limit: tokens at most. lower: whether texts are put in lower case. similarity: of two vectors. transformer: where,
    in the folder, the model lies.
    """

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = True
    limit: int | None = None
    lower: bool = False
    similarity: str = "cosine"
    transformer: str = ""


class SentenceSimilarityPipeline(EncodingPipeline):
    """Tells how near texts are to each other in meaning.

    Vectors are made as the folder's modules.json and 1_Pooling/config.json say, and without them by the mean over the
    tokens, of length 1. What is longer than the model was trained with is cut, and how many were is logged.
    """

    task = "sentence-similarity"

    def __init__(self, model: Any, **settings: Any):
        self.sentences = SentenceSettings()
        super().__init__(model, **settings)

    def load(self, folder: Path, options: dict[str, Any]) -> Any:
        """Return the model of a folder, after what stands there about sentences."""
        self.sentences = sentence_settings(folder)
        return super().load(folder / self.sentences.transformer, options)

    def tokenizer_folder(self) -> Path:
        """Return where the tokenizer lies."""
        return super().tokenizer_folder() / self.sentences.transformer

    def __call__(self, source: Any, sentences: Sequence[str] | None = None) -> Any:
        """Return how near each of `sentences` is to the text `source`: a list of numbers, for the cosine -1 to 1.

        `{"source_sentence": ..., "sentences": [...]}` is the same in one argument, and may come several times.
        """
        if sentences is not None:
            return self._similar({"source_sentence": source, "sentences": sentences})

        def many(questions: list[Any]) -> list[list[float]]:
            return [self._similar(question) for question in questions]

        return answers(source, many, one=(Mapping, str), held=self.batch_size)

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """Return the vector of a text [size], or of each of several [texts, size]; float32."""
        if isinstance(texts, str):
            return self.embed([texts])[0]
        check_texts(texts)
        given = [text.strip().lower() if self.sentences.lower else text.strip() for text in texts]
        if not given:
            raise UsageError("There are no texts: pass at least one.")
        limits = [limit for limit in (self.sentences.limit, self.longest_input) if limit is not None]
        rows = self.rows(given, limit=min(limits, default=None), truncation=True)
        hidden = self.outputs(rows, "last_hidden_state")
        parts = [np.stack([POOLING[mode](values) for values in hidden]) for mode in self.sentences.modes]
        vectors = np.concatenate(parts, -1)
        return unit(vectors) if self.sentences.normalize else vectors

    def _similar(self, question: Any) -> list[float]:
        if not isinstance(question, Mapping) or {"source_sentence", "sentences"} - question.keys():
            raise DataError(
                "A comparison needs a source and sentences: pass both, or {'source_sentence': ..., 'sentences': [...]}."
            )
        sentences = question["sentences"]
        if isinstance(sentences, str) or not isinstance(sentences, Sequence) or not sentences:
            raise DataError("'sentences' must be a list of at least one text.")
        vectors = self.embed([question["source_sentence"], *sentences])
        return SIMILARITIES[self.sentences.similarity](vectors[0], vectors[1:]).tolist()


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [rows, size] of length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _weighted(values: np.ndarray) -> np.ndarray:
    """Return the mean in which the n-th token weighs n."""
    weights = np.arange(1, len(values) + 1, dtype=np.float32)
    return weights @ values / weights.sum()


# From the hidden states [tokens, embed] of a text to its vector [embed].
POOLING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cls": lambda values: values[0],
    "max": lambda values: values.max(0),
    "mean": lambda values: values.mean(0),
    "mean_sqrt_len_tokens": lambda values: values.sum(0) / np.sqrt(np.float32(len(values))),
    "weightedmean": _weighted,
    "lasttoken": lambda values: values[-1],
}
# In the files: "pooling_mode_mean_tokens": true, or in newer ones "pooling_mode": "mean".
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Of a vector [size] and several [texts, size].
SIMILARITIES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": lambda one, others: unit(others) @ unit(one[None])[0],
    "dot": lambda one, others: others @ one,
    "euclidean": lambda one, others: -np.linalg.norm(others - one[None], axis=-1),
    "manhattan": lambda one, others: -np.abs(others - one[None]).sum(-1),
}


def sentence_settings(folder: Path) -> SentenceSettings:
    """Return what the files of sentence-transformers in `folder` say. Raises `CheckpointError` for what we have not."""
    if not (folder / "modules.json").is_file():
        return SentenceSettings()
    modules = _read(folder / "modules.json")
    paths = {module["type"].rpartition(".")[2]: module.get("path", "") for module in modules}
    if unknown := paths.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise CheckpointError(f"'{folder / 'modules.json'}' has {listed(sorted(unknown))}, which distaff has not.")
    transformer = str(PurePosixPath(paths.get("Transformer", "")))
    inner = _read(folder / transformer / "sentence_bert_config.json")
    similarity = _read(folder / "config_sentence_transformers.json").get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise CheckpointError(f"'{folder}' compares by '{similarity}', which is none of {listed(SIMILARITIES)}.")
    return SentenceSettings(
        modes=_modes(folder / paths["Pooling"] / "config.json") if "Pooling" in paths else ("mean",),
        normalize="Normalize" in paths,
        limit=inner.get("max_seq_length"),
        lower=bool(inner.get("do_lower_case")),
        similarity=similarity,
        transformer="" if transformer == "." else transformer,
    )


def _modes(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise CheckpointError(f"There is no '{path}', which says how tokens become a vector: fetch the whole model.")
    values = _read(path)
    named = values.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named or [_OLD_MODES[key] for key in _OLD_MODES if values.get(key)]
    if not modes or set(modes) - POOLING.keys():
        raise CheckpointError(f"'{path}' pools by {listed(modes) or 'nothing'}: distaff has {listed(POOLING)}.")
    if values.get("include_prompt") is False:
        raise CheckpointError(f"'{path}' leaves prompts out of the vector (include_prompt), which distaff does not.")
    return tuple(modes)


def _read(path: Path) -> Any:
    """Return what a JSON file holds, an empty object where there is none."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not valid JSON: {error}.") from error
