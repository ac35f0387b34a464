"""token-classification: what each piece of a text is, and pieces grouped to entities as in Transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from distaff.core.errors import UsageError, listed
from distaff.data.pieces import softmax, special_tokens, windows
from distaff.models.auto import FlaxAutoModelForTokenClassification
from distaff.pipeline_base import TextPipeline, answers, check_texts

Strategy = Literal["none", "simple", "first", "average", "max"]


@dataclass(frozen=True)
class Pieces:
    """A text's pieces without special tokens: ids, names, and from and to which character each stands.

    places: None for a tokenizer that does not know. start: the index of the first piece in the row.
    """

    text: str
    ids: list[int]
    names: list[str]
    places: list[tuple[int, int]] | None
    start: int


class TokenClassificationPipeline(TextPipeline):
    """Says what each piece of a text is.

    aggregation_strategy: "none" answers for each piece; "simple" groups neighbours of one type; "first", "average" and
    "max" give all pieces of a word the label of its first, of the mean of its scores, or of its surest, and then group.
    ignore_labels: what is left out. is_split_into_words: an input is a list of words, with `delimiter` between them.
    A text that is longer than the model goes through it in parts that overlap, and is grouped as a whole.
    """

    task = "token-classification"
    auto_class = FlaxAutoModelForTokenClassification
    options: ClassVar[Mapping[str, Any]] = {
        "aggregation_strategy": "none",
        "ignore_labels": ("O",),
        "is_split_into_words": False,
        "delimiter": " ",
    }

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return the entities of a text, or of each of several.

        An entity is `{"entity", "score", "index", "word", "start", "end"}`, and with an aggregation strategy
        `{"entity_group", "score", "word", "start", "end"}`.
        """
        if "batch_size" in options:
            return self.resized(options.pop("batch_size"))(inputs, **options)
        options = {**self.settings, **self.checked(options)}
        strategy = options["aggregation_strategy"] = str(options["aggregation_strategy"]).lower()
        if strategy not in get_args(Strategy):
            raise UsageError(f"aggregation_strategy '{strategy}' is none of {listed(get_args(Strategy))}.")
        if not self.tokenizer.is_fast and (strategy in ("first", "average", "max") or options["is_split_into_words"]):
            raise UsageError(
                f"{type(self.tokenizer).__name__} does not tell which word a piece belongs to: take "
                "aggregation_strategy='simple', and texts that are not split."
            )

        def many(texts: list[Any]) -> list[Any]:
            return self._many(texts, options)

        if options["is_split_into_words"]:
            single = isinstance(inputs, Sequence) and all(isinstance(word, str) for word in inputs)
            return many([inputs])[0] if single else answers(inputs, many, one=(), held=self.batch_size)
        return answers(inputs, many, one=str, held=self.batch_size)

    def _many(self, texts: list[Any], options: dict[str, Any]) -> list[list[dict[str, Any]]]:
        if options["is_split_into_words"]:
            found = [self._of_words(words, options["delimiter"]) for words in texts]
        else:
            check_texts(texts)
            found = [self._of_text(text) for text in texts]
        named = options["ignore_labels"]
        ignored = {named} if isinstance(named, str) else set(self.options["ignore_labels"] if named is None else named)
        results = []
        for pieces, scores in zip(found, self._scores(found)):
            entities = self._entities(pieces, scores, options["aggregation_strategy"])
            results.append([each for each in entities if each.get("entity", each.get("entity_group")) not in ignored])
        return results

    # Pieces and their scores.

    def _of_text(self, text: str) -> Pieces:
        start = len(special_tokens(self.tokenizer)[0])
        if self.tokenizer.is_fast:
            encoding = self._encode(text)
            return Pieces(text, encoding.ids, encoding.tokens, encoding.offsets, start)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Pieces(text, ids, self.tokenizer.convert_ids_to_tokens(ids), None, start)

    def _of_words(self, words: Sequence[str], delimiter: str) -> Pieces:
        check_texts(words)
        encoding = self._encode(list(words), is_pretokenized=True)
        starts = np.cumsum([0, *(len(word) + len(delimiter) for word in words)]).tolist()
        places = [
            (starts[word] + first, starts[word] + last)
            for word, (first, last) in zip(encoding.word_ids, encoding.offsets)
        ]
        start = len(special_tokens(self.tokenizer)[0])
        return Pieces(delimiter.join(words), encoding.ids, encoding.tokens, places, start)

    def _encode(self, text: Any, **options: Any) -> Any:
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return backend.encode(text, add_special_tokens=False, **options)

    def _scores(self, found: Sequence[Pieces]) -> Iterator[np.ndarray]:
        """Yield for each text the probabilities `[pieces, labels]`, each from the row that owns the piece."""
        before, after = special_tokens(self.tokenizer)
        limit = self.longest_input
        parts = []
        for pieces in found:
            room = len(pieces.ids) if limit is None else limit - len(before) - len(after)
            parts.append(windows(len(pieces.ids), max(1, room)))
        rows = [
            {"input_ids": [*before.tolist(), *pieces.ids[part], *after.tolist()]}
            for pieces, several in zip(found, parts)
            for part, _ in several
        ]
        logits = iter(self.outputs(rows, "logits"))
        for several in parts:
            kept = [next(logits)[len(before) :][: len(owned)][owned] for _, owned in several]
            yield softmax(np.concatenate(kept))

    # Entities.

    def _entities(self, pieces: Pieces, scores: np.ndarray, strategy: Strategy) -> list[dict[str, Any]]:
        units = [self._unit(pieces, number, row) for number, row in enumerate(scores)]
        if strategy in ("first", "average", "max"):
            words: list[list[dict[str, Any]]] = []
            for unit in units:
                if unit["inside"] and words:
                    words[-1].append(unit)
                else:
                    words.append([unit])
            return self._grouped([self._word(word, CHOICES[strategy]) for word in words])
        for unit in units:
            self._label(unit, unit["scores"])
        if strategy == "simple":
            return self._grouped(units)
        return [{name: unit[name] for name in ("entity", "score", "index", "word", "start", "end")} for unit in units]

    def _unit(self, pieces: Pieces, number: int, scores: np.ndarray) -> dict[str, Any]:
        """Return a piece with what grouping needs; "inside" tells whether it goes on a word."""
        start = end = None
        word, inside = pieces.names[number], False
        if pieces.places is not None:
            start, end = pieces.places[number]
            text = pieces.text[start:end]
            if getattr(self.tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None):
                inside = len(word) != len(text)
            else:
                # Where the pieces do not say, a word goes on where no space stands before or in front.
                inside = start > 0 and " " not in pieces.text[start - 1 : start + 1]
            if pieces.ids[number] == self.tokenizer.unk_token_id:
                word, inside = text, False
        found = {"word": word, "start": start, "end": end, "index": pieces.start + number}
        return {**found, "scores": scores, "inside": inside}

    def _label(self, unit: dict[str, Any], scores: np.ndarray) -> dict[str, Any]:
        best = int(scores.argmax())
        unit |= {"entity": self.model.config.id2label[best], "score": float(scores[best])}
        return unit

    def _word(self, word: list[dict[str, Any]], choose: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        """Return the pieces of a word as one, with the scores that are chosen of theirs, `[pieces, labels]`."""
        text = self.tokenizer.convert_tokens_to_string([piece["word"] for piece in word])
        whole = {"word": text, "start": word[0]["start"], "end": word[-1]["end"]}
        return self._label(whole, choose(np.stack([piece["scores"] for piece in word])))

    def _grouped(self, units: list[dict[str, Any]]) -> list[dict[str, Any]]:
        groups: list[list[dict[str, Any]]] = []
        last = ""
        for unit in units:
            begins, kind = _kind(unit["entity"])
            if groups and kind == last and not begins:
                groups[-1].append(unit)
            else:
                groups.append([unit])
            last = kind
        return [
            {
                "entity_group": group[0]["entity"].split("-", 1)[-1],
                "score": float(np.mean([unit["score"] for unit in group])),
                "word": self.tokenizer.convert_tokens_to_string([unit["word"] for unit in group]),
                "start": group[0]["start"],
                "end": group[-1]["end"],
            }
            for group in groups
        ]


# What the scores `[pieces, labels]` of a word come to.
CHOICES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "first": lambda scores: scores[0],
    "average": lambda scores: scores.mean(0),
    "max": lambda scores: scores[scores.max(-1).argmax()],
}


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and its type."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label
