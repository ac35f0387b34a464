"""`distaff predict TASK MODEL TEXT...`: the pipelines of texts on the command line."""

import abc
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distaff.core.errors import UsageError
from distaff.data.files import ReadCount, expand_files, read_texts
from distaff.pipelines import pipeline
from distaff.tasks._flags import flag
from distaff.tasks._lines import check_words, lines_of

logger = logging.getLogger("distaff")


@dataclass(kw_only=True)
class PredictFlags(abc.ABC):
    """Flags that the commands share; one that is not given is left to the pipeline.

    task: of the pipeline. answer: the key of an answer in a line of JSON. options: names of flags that are settings of
    the pipeline.
    """

    model_name_or_path: str = flag("", "Folder or Hub id of the model; may stand first.", required=True)
    texts: list[str] = flag([], "Texts; may follow the model, or come from a file or from standard input.")
    file: str | None = flag(None, "Texts instead: .txt (a line each), .jsonl, .json, .csv or .parquet; commas, globs.")
    text_column: str | None = flag(None, "Column of the texts in --file, by default 'text' or the first of strings.")
    json: bool = flag(False, "Print a line of JSON a text.")

    task: ClassVar[str] = ""
    answer: ClassVar[str] = "answer"
    options: ClassVar[tuple[str, ...]] = ()

    def given(self) -> Iterator[str]:
        """Return the texts; those of files and standard input are read as they are asked for."""
        if self.texts and self.file:
            raise UsageError("Texts are given and a file of texts: leave --file out, or the texts.")
        if self.text_column and not self.file:
            raise UsageError("--text_column is a column of --file: name one.")
        if self.file:
            return self._of_files(expand_files(self.file))
        check_words(self.texts)
        return iter(self.texts) if self.texts else lines_of(sys.stdin, "Standard input")

    def _of_files(self, paths: list[Path]) -> Iterator[str]:
        for path in paths:
            count = ReadCount()
            yield from read_texts(path, column=self.text_column, count=count)
            if count.blank:
                logger.warning("%s: %d blank rows have no answer.", path, count.blank)

    def open(self) -> Any:
        """Return the pipeline."""
        chosen = {name: getattr(self, name) for name in self.options}
        settings = {name: value for name, value in chosen.items() if value is not None}
        return pipeline(self.task, self.model_name_or_path, **settings)

    def answers(self, call: Any, texts: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield each text with its answer."""
        shown, asked = itertools.tee(texts)
        yield from zip(shown, call(asked))

    @abc.abstractmethod
    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield the lines that are printed without --json."""


def predict(flags: PredictFlags) -> int:
    """Print the answer to each text."""
    texts = flags.given()
    # Asked for before the model is opened, which takes longer.
    first = next(texts, None)
    if first is None:
        raise UsageError("There is no text: write it after the model, name a --file, or pipe lines in.")
    for text, answer in flags.answers(flags.open(), itertools.chain([first], texts)):
        line = json.dumps({"text": text, flags.answer: answer}, ensure_ascii=False)
        print(line if flags.json else "\n".join(flags.readable(text, answer)), flush=True)
    return 0


@dataclass(kw_only=True)
class BatchFlags(PredictFlags):
    """Flags of the commands that compute several texts together."""

    batch_size: int = flag(8, "Texts that are computed together.")
    dtype: str = flag("float32", "dtype of the computation: float32, bfloat16 or float16.")

    mesh: str | None = flag(None, "Devices that share the work: data=2,tensor=4; by default the first alone.")

    options: ClassVar[tuple[str, ...]] = ("batch_size", "dtype", "mesh")


@dataclass(kw_only=True)
class FillMaskFlags(BatchFlags):
    """Flags of `distaff predict fill-mask`."""

    top_k: int = flag(5, "Fillings a mask.")

    task, answer = "fill-mask", "fillings"
    options: ClassVar[tuple[str, ...]] = (*BatchFlags.options, "top_k")

    def open(self) -> Any:
        """Return the pipeline."""
        if self.top_k < 1:
            raise UsageError(f"--top_k is {self.top_k}: it must be at least 1.")
        return super().open()

    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield the text, and for each mask its fillings."""
        yield text
        for mask in answer if isinstance(answer[0], list) else [answer]:
            yield "  " + "  ".join(f"{filling['token_str'].strip()} {filling['score']:.3f}" for filling in mask)


@dataclass(kw_only=True)
class TextClassificationFlags(BatchFlags):
    """Flags of `distaff predict text-classification`."""

    top_k: int | None = flag(None, "So many classes, best first, instead of the best alone.")
    function_to_apply: str | None = flag(None, "softmax, sigmoid or none, by default as the config says.")
    truncation: bool = flag(False, "Cut texts that are longer than the model.")

    task, answer = "text-classification", "classes"
    options: ClassVar[tuple[str, ...]] = (*BatchFlags.options, "top_k", "function_to_apply", "truncation")

    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield the text, and its classes."""
        yield text
        for each in answer if isinstance(answer, list) else [answer]:
            yield f"  {each['label']}  {each['score']:.3f}"


@dataclass(kw_only=True)
class ZeroShotClassificationFlags(BatchFlags):
    """Flags of `distaff predict zero-shot-classification`."""

    candidate_labels: str = flag("", "Labels of which one fits, with commas between them.", required=True)
    hypothesis_template: str | None = flag(None, "Sentence that is judged, with {} for a label.")
    multi_label: bool = flag(False, "Judge each label by itself.")

    task, answer = "zero-shot-classification", "classes"
    options: ClassVar[tuple[str, ...]] = (
        *BatchFlags.options,
        "candidate_labels",
        "hypothesis_template",
        "multi_label",
    )

    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield the text, and the labels with their scores."""
        yield text
        for label, score in zip(answer["labels"], answer["scores"]):
            yield f"  {label}  {score:.3f}"


@dataclass(kw_only=True)
class TokenClassificationFlags(BatchFlags):
    """Flags of `distaff predict token-classification`."""

    aggregation_strategy: str = flag("none", "none, or how pieces become entities: simple, first, average or max.")

    task, answer = "token-classification", "entities"
    options: ClassVar[tuple[str, ...]] = (*BatchFlags.options, "aggregation_strategy")

    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield the text, and each entity with its place."""
        yield text
        for each in answer:
            place = "" if each["start"] is None else f"  ({each['start']}-{each['end']})"
            yield f"  {each['word']}  {each.get('entity_group', each.get('entity'))}  {each['score']:.3f}{place}"


@dataclass(kw_only=True)
class FeatureExtractionFlags(BatchFlags):
    """Flags of `distaff predict feature-extraction`."""

    truncation: bool = flag(False, "Cut texts that are longer than the model.")
    json: bool = flag(True, "Print a line of JSON a text; False: how many tokens and numbers there are.")

    task, answer = "feature-extraction", "features"
    options: ClassVar[tuple[str, ...]] = (*BatchFlags.options, "truncation")

    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield the text, and the size of its features."""
        yield text
        yield f"  {len(answer[0])} tokens of {len(answer[0][0])} numbers"


@dataclass(kw_only=True)
class SentenceSimilarityFlags(BatchFlags):
    """Flags of `distaff predict sentence-similarity`: the first text is compared with the others."""

    task, answer = "sentence-similarity", "score"

    def given(self) -> Iterator[str]:
        """Return the source, and the texts behind it or of a file."""
        if not self.file:
            return super().given()
        if len(self.texts) != 1:
            raise UsageError("With --file one text is needed, which those of the file are compared with.")
        check_words(self.texts)
        return itertools.chain(self.texts, self._of_files(expand_files(self.file)))

    def answers(self, call: Any, texts: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield each text but the first with how near it is to that."""
        source, *others = texts
        if not others:
            raise UsageError("There is nothing to compare with: write more texts behind the first.")
        yield from zip(others, call(source, others))

    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield the score and the text."""
        yield f"{answer:.4f}  {text}"


@dataclass(kw_only=True)
class WritingFlags(BatchFlags):
    """Flags of the commands that write texts; 'distaff generate' has all the options of generation."""

    max_new_tokens: int | None = flag(None, "Tokens to generate at most.")
    num_beams: int | None = flag(None, "Beams of beam search.")
    truncation: bool = flag(False, "Cut texts that are longer than the model.")

    answer = "generated"
    options: ClassVar[tuple[str, ...]] = (*BatchFlags.options, "max_new_tokens", "num_beams", "truncation")

    def readable(self, text: str, answer: Any) -> Iterator[str]:
        """Yield what was written."""
        for each in answer:
            yield next(iter(each.values()))


@dataclass(kw_only=True)
class TextGenerationFlags(WritingFlags):
    """Flags of `distaff predict text-generation`."""

    return_full_text: bool = flag(True, "Print the text before its continuation.")

    task = "text-generation"
    options: ClassVar[tuple[str, ...]] = (*WritingFlags.options, "return_full_text")


@dataclass(kw_only=True)
class Text2TextFlags(WritingFlags):
    """Flags of `distaff predict text2text-generation`."""

    prefix: str | None = flag(None, "Text before each text, by default as the config says.")

    task = "text2text-generation"
    options: ClassVar[tuple[str, ...]] = (*WritingFlags.options, "prefix")


@dataclass(kw_only=True)
class SummarizationFlags(Text2TextFlags):
    """Flags of `distaff predict summarization`."""

    task = "summarization"


@dataclass(kw_only=True)
class TranslationFlags(Text2TextFlags):
    """Flags of `distaff predict translation`."""

    src_lang: str | None = flag(None, "Code of the texts' language, for mBART.")
    tgt_lang: str | None = flag(None, "Code of the language to write, for mBART.")

    task = "translation"
    options: ClassVar[tuple[str, ...]] = (*Text2TextFlags.options, "src_lang", "tgt_lang")
