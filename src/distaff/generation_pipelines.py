"""Pipelines that write: text-generation, text2text-generation, summarization, translation."""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from transformers import PretrainedConfig

from distaff.core.errors import DataError, UsageError
from distaff.hub import open_tokenizer, resolve
from distaff.models.auto import FlaxAutoModelForCausalLM, FlaxAutoModelForSeq2SeqLM
from distaff.pipeline_base import answers, check_batch_size, check_texts, loading_settings

logger = logging.getLogger(__name__)


class GenerationPipeline:
    """Tokenises, generates in batches of similar lengths, and decodes.

    `model` is a folder, a Hub id, or a model object with its `tokenizer`; further settings are defaults of calls.
    """

    auto_class: ClassVar[Any] = None
    task: ClassVar[str] = ""
    answer: ClassVar[str] = "generated_text"

    def __init__(self, model: Any, *, tokenizer: Any = None, batch_size: int = 8, **settings: Any):
        loading = loading_settings(settings)
        if isinstance(model, str) or not hasattr(model, "module"):
            where = {name: settings.pop(name) for name in ("revision", "token") if name in settings}
            folder = resolve(str(model), **where)
            tokenizer = tokenizer or open_tokenizer(folder)
            model = self.auto_class.from_pretrained(folder, **loading)
        elif loading:
            raise UsageError(f"The model is loaded already: leave {' and '.join(loading)} out.")
        if tokenizer is None:
            raise UsageError("A model object needs its tokenizer: pass tokenizer=...")
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.batch_size = check_batch_size(batch_size)

    def __call__(self, texts: Any, **options: Any) -> Any:
        """Return for a text a list of `{"generated_text": ...}`, one a returned sequence; for several texts, of lists.

        `options` are those of `model.generate`, and of the pipeline: `truncation=True` cuts what is longer than the
        model, with the count logged.

        Raises `DataError` for a text without tokens, and for what is too long.
        """
        options = {**self.settings, **options}
        size = check_batch_size(options.pop("batch_size", self.batch_size))
        return answers(texts, lambda given: self._generate(given, options, size), one=str, held=size)

    def stream(self, text: str, write: Callable[[str], Any], **options: Any) -> str:
        """Generate for one text, calling `write` with each piece of new text as it comes; return all of it."""
        options = {**self.settings, **options}
        row = self._rows([text], options)[0]
        pieces = Pieces(self.tokenizer, [] if self.model.config.is_encoder_decoder else row, write)
        self.model.generate([row], streamer=pieces, **self._options(options))
        return pieces.finish()

    # What the kinds say otherwise.

    def prepared(self, text: str, options: dict[str, Any]) -> str:
        """Return what is tokenised for a text."""
        return text

    def ids_of(self, text: str) -> list[int]:
        """Return the tokens of what was prepared."""
        return self.tokenizer(text)["input_ids"]

    def result(self, text: str, row: list[int], new: list[int], options: dict[str, Any]) -> str:
        """Return the answer for a text, its tokens, and the new ones."""
        return self.tokenizer.decode(new, skip_special_tokens=True).strip()

    # Inside.

    def _generate(self, texts: list[str], options: dict[str, Any], size: int) -> list[list[dict[str, str]]]:
        rows = self._rows(texts, options)
        chosen = self._options(options)
        results: list[list[dict[str, str]]] = [[] for _ in texts]
        order = np.argsort([len(row) for row in rows], kind="stable")
        for start in range(0, len(order), size):
            batch = order[start : start + size].tolist()
            outputs = self.model.generate([rows[index] for index in batch], **chosen)
            copies = len(outputs.sequences) // len(batch)
            first = outputs.sequences.shape[1] - int(outputs.lengths.max())
            for place, (sequence, length) in enumerate(zip(outputs.sequences, outputs.lengths)):
                index = batch[place // copies]
                new = sequence[first : first + length].tolist()
                results[index].append({self.answer: self.result(texts[index], rows[index], new, options)})
        return results

    def _rows(self, texts: list[str], options: dict[str, Any]) -> list[list[int]]:
        check_texts(texts)
        rows = [self.ids_of(self.prepared(text, options)) for text in texts]
        empty = next((index for index, row in enumerate(rows) if not row), None)
        if empty is not None:
            raise DataError(f"Text {empty} ({texts[empty]!r}) has no tokens: write something.")
        longest = getattr(self.model, "longest_input", None)
        if not options.get("truncation") or longest is None:
            return rows
        most = longest if self.model.config.is_encoder_decoder else longest - 1
        cut = sum(len(row) > most for row in rows)
        if cut:
            logger.warning("%d of %d texts are longer than %d tokens and were cut.", cut, len(rows), most)
        return [row[:most] for row in rows]

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of `generate`."""
        chosen = {name: value for name, value in options.items() if name not in self.own_options()}
        if chosen.get("stop_strings"):
            chosen["tokenizer"] = self.tokenizer
        pad = self.tokenizer.pad_token_id
        if pad is not None and self.model.config.pad_token_id is None and pad < self.model.config.vocab_size:
            chosen.setdefault("pad_token_id", pad)
        return chosen

    @classmethod
    def own_options(cls) -> tuple[str, ...]:
        """Return the options that `generate` does not know."""
        return ("truncation",)


class TextGenerationPipeline(GenerationPipeline):
    """Continues texts. `return_full_text=False` leaves the text itself out of the answer."""

    auto_class = FlaxAutoModelForCausalLM
    task = "text-generation"

    def ids_of(self, text: str) -> list[int]:
        """Return the tokens of a text, without the end that tokenizers made for encoders put behind it.

        A text that has ended is not continued: the model would begin another one.
        """
        row = super().ids_of(text)
        if len(row) < 2 or row[-1] != self.tokenizer.eos_token_id or text.endswith(str(self.tokenizer.eos_token)):
            return row
        return row[:-1]

    def result(self, text: str, row: list[int], new: list[int], options: dict[str, Any]) -> str:
        """Return the text and its continuation, or that alone."""
        before = self.tokenizer.decode(row, skip_special_tokens=True)
        continued = self.tokenizer.decode([*row, *new], skip_special_tokens=True)[len(before) :]
        return text + continued if options.get("return_full_text", True) else continued

    @classmethod
    def own_options(cls) -> tuple[str, ...]:
        """Return the options that `generate` does not know."""
        return ("truncation", "return_full_text")


class Text2TextPipeline(GenerationPipeline):
    """Answers texts with an encoder-decoder. `prefix` stands before each text, by default as the config says."""

    auto_class = FlaxAutoModelForSeq2SeqLM
    task = "text2text-generation"

    def prepared(self, text: str, options: dict[str, Any]) -> str:
        """Return the text behind its prefix."""
        prefix = options.get("prefix")
        if prefix is None:
            task = (getattr(self.model.config, "task_specific_params", None) or {}).get(self.task, {})
            prefix = task.get("prefix") or getattr(self.model.config, "prefix", None) or ""
        return prefix + text

    @classmethod
    def own_options(cls) -> tuple[str, ...]:
        """Return the options that `generate` does not know."""
        return ("truncation", "prefix")


class SummarizationPipeline(Text2TextPipeline):
    """Summarises texts."""

    task = "summarization"
    answer = "summary_text"


class TranslationPipeline(Text2TextPipeline):
    """Translates texts; multilingual models need `tgt_lang`, and `src_lang` where the tokenizer's is another one."""

    task = "translation"
    answer = "translation_text"

    def _rows(self, texts: list[str], options: dict[str, Any]) -> list[list[int]]:
        source = options.get("src_lang")
        if source is not None:
            if not hasattr(self.tokenizer, "src_lang"):
                raise UsageError(f"The tokenizer knows no languages: leave src_lang={source!r} out.")
            self.language(source)
            self.tokenizer.src_lang = source
        return super()._rows(texts, options)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        chosen, target = super()._options(options), options.get("tgt_lang")
        config, file = self.model.config, self.model.generation_config or {}
        start = chosen.get("decoder_start_token_id", file.get("decoder_start_token_id", config.decoder_start_token_id))
        if target is not None:
            # Where nothing else starts the decoder, the language does, as in the first mBART.
            alone = config.model_type == "mbart" and start is None
            chosen["decoder_start_token_id" if alone else "forced_bos_token_id"] = self.language(target)
            return chosen
        told = chosen.get("forced_bos_token_id", file.get("forced_bos_token_id"))
        if config.model_type == "mbart" and told is None and start in (None, config.eos_token_id):
            raise UsageError("This model writes many languages: name the target with tgt_lang, such as 'de_DE'.")
        return chosen

    @classmethod
    def own_options(cls) -> tuple[str, ...]:
        """Return the options that `generate` does not know."""
        return (*super().own_options(), "src_lang", "tgt_lang")

    def language(self, code: str) -> int:
        """Return the token of a language. Raises `UsageError` for one that the tokenizer does not have."""
        token = self.tokenizer.convert_tokens_to_ids(code)
        if token is None or token == self.tokenizer.unk_token_id:
            raise UsageError(f"The tokenizer has no language '{code}': use one of its codes, such as 'de_DE'.")
        return token


class Pieces:
    """Turns new tokens into text as they come: a character that is not complete yet waits for the next token."""

    def __init__(self, tokenizer: Any, row: list[int], write: Callable[[str], Any]):
        self.tokenizer, self.write = tokenizer, write
        self.row, self.shown = list(row), len(tokenizer.decode(row, skip_special_tokens=True))
        self.text = ""

    def __call__(self, tokens: np.ndarray) -> None:
        """Take the newest token of the only row."""
        self.row.append(int(tokens[0]))
        self._show(final=False)

    def finish(self) -> str:
        """Write what waited, and return all that was written."""
        self._show(final=True)
        return self.text

    def _show(self, *, final: bool) -> None:
        text = self.tokenizer.decode(self.row, skip_special_tokens=True)
        if text.endswith("\ufffd") and not final:
            return
        piece, self.shown = text[self.shown :], max(self.shown, len(text))
        if piece:
            self.text += piece
            self.write(piece)


def open_generator(model: str, **settings: Any) -> GenerationPipeline:
    """Return the pipeline that fits the model of a folder or Hub id: for decoders, encoder-decoders, or languages."""
    folder = resolve(model)
    config, _ = PretrainedConfig.get_config_dict(folder)
    kind, kinds = config.get("model_type"), {"mbart": TranslationPipeline}
    if config.get("is_encoder_decoder") or kind in ("t5", "mt5", "bart", "mbart"):
        return kinds.get(str(kind), Text2TextPipeline)(str(folder), **settings)
    return TextGenerationPipeline(str(folder), **settings)


KINDS = (TextGenerationPipeline, Text2TextPipeline, SummarizationPipeline, TranslationPipeline)
