"""The widgets' tasks as calls: `pipeline("fill-mask", "folder")("Zürich isch e <mask>.")`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from distaff.classification_pipelines import TextClassificationPipeline, ZeroShotClassificationPipeline
from distaff.core.errors import DataError, UsageError, listed
from distaff.embedding_pipelines import FeatureExtractionPipeline, SentenceSimilarityPipeline
from distaff.generation_pipelines import KINDS
from distaff.hub import resolve
from distaff.loading import config_values
from distaff.models.auto import FlaxAutoModelForMaskedLM
from distaff.pipeline_base import TextPipeline, answers, check_texts
from distaff.question_pipelines import QuestionAnsweringPipeline
from distaff.token_pipelines import TokenClassificationPipeline

# Other names of tasks.
ALIASES = {"ner": "token-classification", "sentiment-analysis": "text-classification"}
# What a config's architecture ends in, and the task of such a model.
_TASKS = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "Model": "feature-extraction",
}


def pipeline(task: str | None = None, model: Any = None, *, tokenizer: Any = None, **settings: Any) -> Any:
    """Return a callable for `task` with `model`: a folder, a Hub id, or a loaded model with its tokenizer.

    Without `task` the model decides: by `architectures` in its config, or for a folder of sentence-transformers by its
    modules.json. Raises `UsageError` for a task that there is not.
    """
    if model is None:
        raise UsageError(f"pipeline('{task}') needs a model: a folder, a Hub id, or a model object.")
    if task is None:
        where = {name: settings[name] for name in ("revision", "token") if name in settings}
        task = task_of(resolve(str(model), **where) if isinstance(model, str | os.PathLike) else model)
    task = ALIASES.get(task, task)
    if task not in PIPELINES:
        raise UsageError(f"There is no pipeline '{task}': choose one of {listed(PIPELINES)}.")
    return PIPELINES[task](model, tokenizer=tokenizer, **settings)


def task_of(model: Any) -> str:
    """Return the task of a folder's model or of a model object. Raises `UsageError` where it does not tell."""
    if not isinstance(model, Path):
        names, where = [type(model).__name__], f"The class {type(model).__name__}"
    elif (model / "modules.json").is_file():
        return "sentence-similarity"
    else:
        names, where = config_values(model).get("architectures") or [], f"'{model / 'config.json'}'"
    for name in names:
        task = next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)
        if task is not None:
            return task
    told = f"names {listed(names)}, which is the model of no task" if names else "names no architectures"
    raise UsageError(f"{where} {told}: say which of {listed(PIPELINES)} is meant.")


class FillMaskPipeline(TextPipeline):
    """Replaces each mask token of a text by the tokens that the model finds likeliest there.

    top_k: fillings of a mask. targets: the only words that compete for the ranks.
    """

    task = "fill-mask"
    auto_class = FlaxAutoModelForMaskedLM
    options: ClassVar[Mapping[str, Any]] = {"top_k": 5, "targets": None}

    def __init__(self, model: Any, **settings: Any):
        super().__init__(model, **settings)
        if self.tokenizer.mask_token_id is None:
            raise UsageError(f"The tokenizer '{self.tokenizer.name_or_path}' has no mask token to fill.")
        _check_top_k(self.settings["top_k"])

    def __call__(self, texts: Any, **options: Any) -> Any:
        """Return the best `top_k` fillings, best first, of a text, or a list of them for each of several.

        A filling is `{"score", "token", "token_str", "sequence"}`; for a text with several masks there is a list of
        fillings a mask. Scores stay those of the vocabulary with `targets` too.

        Raises `DataError` for a text without a mask token or longer than the model's positions.
        """
        if "batch_size" in options:
            return self.resized(options.pop("batch_size"))(texts, **options)
        given = {**self.settings, **{name: value for name, value in self.checked(options).items() if value is not None}}
        _check_top_k(given["top_k"])
        targets = [given["targets"]] if isinstance(given["targets"], str) else given["targets"]
        if targets is not None and not targets:
            raise UsageError("targets is empty: name words that may be filled in, or leave it out.")

        def many(given_texts: list[str]) -> list[Any]:
            check_texts(given_texts)
            rows = [self._ids(text) for text in given_texts]
            allowed = self._target_ids(targets)
            found = zip(rows, self._probabilities(rows))
            return [self._fillings(ids, shares, given["top_k"], allowed) for ids, shares in found]

        return answers(texts, many, one=str, held=self.batch_size)

    def _ids(self, text: str) -> np.ndarray:
        ids = np.asarray(self.tokenizer(text, verbose=False)["input_ids"], np.int32)
        if self.tokenizer.mask_token_id not in ids:
            raise DataError(f"No '{self.tokenizer.mask_token}' in {text!r}: mark the place to fill with it.")
        if self.longest_input is not None and len(ids) > self.longest_input:
            raise DataError(
                f"A text of {len(ids)} tokens is longer than the {self.longest_input} of the model: shorten it."
            )
        return ids

    def _masks(self, ids: np.ndarray) -> np.ndarray:
        return np.flatnonzero(ids == self.tokenizer.mask_token_id)

    def _probabilities(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Return for each row of ids `[masks, vocab]` of the real vocabulary; rows of similar lengths go together."""
        found: list[Any] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            arrays = self.padded([{"input_ids": rows[index].tolist()} for index in chosen])
            places = [self._masks(rows[index]) for index in chosen]
            # Few numbers of masks are few programs.
            most = 1 << (max(len(each) for each in places) - 1).bit_length()
            positions = np.zeros((len(arrays["input_ids"]), most), np.int32)
            for row, each in enumerate(places):
                positions[row, : len(each)] = each
            logits = self.model(**arrays, masked_positions=positions).logits
            shares = np.asarray(jax.nn.softmax(logits[..., : len(self.tokenizer)].astype(jnp.float32), axis=-1))
            for row, index in enumerate(chosen):
                found[index] = shares[row, : len(places[row])]
        return found

    def _fillings(self, ids: np.ndarray, shares: np.ndarray, top_k: int, allowed: np.ndarray | None) -> list[Any]:
        """Return the fillings of each mask, or of the only one."""
        candidates = np.arange(shares.shape[-1]) if allowed is None else allowed
        fillings = []
        for place, row in zip(self._masks(ids).tolist(), shares):
            best = candidates[np.argsort(-row[candidates], kind="stable")[:top_k]]
            fillings.append([self._filling(ids, place, int(token), float(row[token])) for token in best])
        return fillings[0] if len(fillings) == 1 else fillings

    def _filling(self, ids: np.ndarray, place: int, token: int, score: float) -> dict[str, Any]:
        filled = ids.copy()
        filled[place] = token
        special = set(self.tokenizer.all_special_ids) - {self.tokenizer.mask_token_id, token}
        kept = [index for index in filled.tolist() if index not in special]
        return {
            "score": score,
            "token": token,
            "token_str": self.tokenizer.decode([token]),
            "sequence": self.tokenizer.decode(kept).strip(),
        }

    def _target_ids(self, targets: Sequence[str] | None) -> np.ndarray | None:
        if targets is None:
            return None
        ids = []
        unknown = self.tokenizer.unk_token_id
        for word in targets:
            # Inside a text a word follows a space, which byte-level tokenizers keep as a part of it.
            pieces = [self.tokenizer(form, add_special_tokens=False)["input_ids"] for form in (f" {word}", word)]
            single = next((piece[0] for piece in pieces if len(piece) == 1 and piece[0] != unknown), None)
            if single is None:
                raise DataError(f"The target '{word}' is no single token of this model.")
            ids.append(single)
        return np.asarray(sorted(set(ids)))


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise UsageError(f"top_k is {top_k}: it must be at least 1.")


def _image_classification(model: Any, **settings: Any) -> Any:
    # Images need Pillow, which those who have none do without.
    from distaff.image_pipelines import ImageClassificationPipeline

    return ImageClassificationPipeline(model, **settings)


PIPELINES: dict[str, Any] = {
    "fill-mask": FillMaskPipeline,
    "question-answering": QuestionAnsweringPipeline,
    "text-classification": TextClassificationPipeline,
    "zero-shot-classification": ZeroShotClassificationPipeline,
    "token-classification": TokenClassificationPipeline,
    "feature-extraction": FeatureExtractionPipeline,
    "sentence-similarity": SentenceSimilarityPipeline,
    "image-classification": _image_classification,
    **{kind.task: kind for kind in KINDS},
}
