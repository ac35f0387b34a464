"""The widgets' tasks as calls: `pipeline("fill-mask", "folder")("Zürich isch e <mask>.")`."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distaff.core.errors import DataError, UsageError, listed
from distaff.embedding_pipelines import FeatureExtractionPipeline, SentenceSimilarityPipeline
from distaff.generation_pipelines import KINDS
from distaff.hub import open_tokenizer, resolve
from distaff.loading import config_values
from distaff.models.auto import FlaxAutoModelForMaskedLM
from distaff.pipeline_base import answers, check_texts
from distaff.question_pipelines import QuestionAnsweringPipeline
from distaff.token_pipelines import TokenClassificationPipeline

# Rows are padded to a multiple of this, so that texts of many lengths are few programs.
_LENGTH_MULTIPLE = 16


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


class FillMaskPipeline:
    """Replaces each mask token of a text by the tokens that the model finds likeliest there."""

    def __init__(self, model: Any, *, tokenizer: Any = None, top_k: int = 5, **settings: Any):
        if unknown := sorted(settings.keys() - {"revision", "token"}):
            near = difflib.get_close_matches(unknown[0].replace("topk", "top_k"), ("top_k", "revision", "token"), 1)
            hint = f"did you mean '{near[0]}'?" if near else "it has top_k, tokenizer, revision and token."
            raise UsageError(f"The fill-mask pipeline has no setting '{unknown[0]}': {hint}")
        _check_top_k(top_k)
        if isinstance(tokenizer, str | os.PathLike):
            tokenizer = open_tokenizer(resolve(tokenizer, weights=False))
        if isinstance(model, str) or not hasattr(model, "module"):
            folder = resolve(str(model), **settings)
            tokenizer = tokenizer or open_tokenizer(folder)
            model = FlaxAutoModelForMaskedLM.from_pretrained(folder)
        elif settings:
            raise UsageError(f"The model is loaded already: leave {' and '.join(settings)} out.")
        if tokenizer is None:
            raise UsageError("A model object needs its tokenizer: pass tokenizer=...")
        if tokenizer.mask_token_id is None:
            raise UsageError(f"The tokenizer '{tokenizer.name_or_path}' has no mask token to fill.")
        if len(tokenizer) > model.config.vocab_size:
            raise UsageError(
                f"The tokenizer has {len(tokenizer)} tokens and the model a vocab_size of {model.config.vocab_size}: "
                "they do not belong together."
            )
        self.model, self.tokenizer, self.top_k = model, tokenizer, top_k

    def __call__(self, texts: Any, *, top_k: int | None = None, targets: str | Sequence[str] | None = None) -> Any:
        """Return the best `top_k` fillings, best first, of a text, or a list of them for each of several.

        A filling is `{"score", "token", "token_str", "sequence"}`; for a text with several masks there is a list of
        fillings a mask. With `targets` only these words compete for the ranks; scores stay those of the vocabulary.

        Raises `DataError` for a text without a mask token or longer than the model's positions.
        """
        top_k = self.top_k if top_k is None else top_k
        _check_top_k(top_k)
        targets = [targets] if isinstance(targets, str) else targets
        if targets is not None and not targets:
            raise UsageError("targets is empty: name words that may be filled in, or leave it out.")

        def many(given: list[str]) -> list[Any]:
            check_texts(given)
            return [self._fill(text, top_k, targets) for text in given]

        return answers(texts, many, one=str, held=1)

    def _fill(self, text: str, top_k: int, targets: Sequence[str] | None) -> list[Any]:
        ids = np.asarray(self.tokenizer(text)["input_ids"], np.int32)
        places = np.flatnonzero(ids == self.tokenizer.mask_token_id)
        if places.size == 0:
            raise DataError(f"No '{self.tokenizer.mask_token}' in {text!r}: mark the place to fill with it.")
        if len(ids) > self.model.longest_input:
            raise DataError(
                f"A text of {len(ids)} tokens is longer than the {self.model.longest_input} of the model: shorten it."
            )
        probabilities = self._probabilities(ids, places)
        allowed = self._target_ids(targets)
        fillings = []
        for place, row in zip(places.tolist(), probabilities):
            candidates = np.arange(len(row)) if allowed is None else allowed
            best = candidates[np.argsort(-row[candidates], kind="stable")[:top_k]]
            fillings.append([self._filling(ids, place, int(token), float(row[token])) for token in best])
        return fillings[0] if len(fillings) == 1 else fillings

    def _probabilities(self, ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return `[masks, vocab]` of the real vocabulary, for one row of ids."""
        length = min(-(-len(ids) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, self.model.longest_input)
        pad_id = self.tokenizer.pad_token_id or 0
        padded = np.full((1, length), pad_id, np.int32)
        padded[0, : len(ids)] = ids
        mask = (np.arange(length) < len(ids)).astype(np.int32)[None]
        outputs = self.model(padded, mask, masked_positions=places[None].astype(np.int32))
        logits = outputs.logits[0, :, : len(self.tokenizer)].astype(jnp.float32)
        return np.asarray(jax.nn.softmax(logits, axis=-1))

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
    "token-classification": TokenClassificationPipeline,
    "feature-extraction": FeatureExtractionPipeline,
    "sentence-similarity": SentenceSimilarityPipeline,
    "image-classification": _image_classification,
    **{kind.task: kind for kind in KINDS},
}
