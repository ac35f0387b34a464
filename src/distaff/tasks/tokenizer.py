"""Train a tokenizer on raw text and write a folder that `AutoTokenizer` opens.

    distaff tokenizer train --train_file a.txt --vocab_size 50265 --output_dir roberta-als

`--algorithm byte-level-bpe` (the default) gives RoBERTa's layout, `<s> a </s>` and `<s> a </s></s> b </s>`, and gives
every text back unchanged; `wordpiece` gives BERT's, `[CLS] a [SEP] b [SEP]` with token types; `unigram` gives
XLM-RoBERTa's. 1 MB of text and 8,000 tokens take some seconds on two cores.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.text import load_texts
from distaff.hub.tokenizer import VOCABULARIES
from distaff.tasks._folder import output_folder

logger = logging.getLogger(__name__)

Algorithm = Literal["byte-level-bpe", "wordpiece", "unigram"]


@dataclass(frozen=True)
class TokenizerFlags:
    """The flags of `distaff tokenizer train`."""

    output_dir: str = field(metadata={"help": "Folder for the tokenizer's files."})
    train_file: str | None = field(
        default=None, metadata={"help": "Text: .txt, .jsonl, .json, .csv or .parquet; comma lists and globs."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub instead of files."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    text_column: str | None = field(default=None, metadata={"help": "Column of the text, if not 'text'."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Read only so many texts."})
    algorithm: Algorithm = field(
        default="byte-level-bpe", metadata={"help": "byte-level-bpe (RoBERTa), wordpiece (BERT) or unigram (XLM-R)."}
    )
    vocab_size: int = field(default=50265, metadata={"help": "Tokens at most, special ones included."})
    min_frequency: int = field(
        default=2, metadata={"help": "How often a pair must occur to be joined (not for unigram, which has none)."}
    )
    special_tokens: str | None = field(
        default=None, metadata={"help": "Special tokens beside the usual ones, separated by commas."}
    )
    extra_ids: int = field(default=0, metadata={"help": "T5's sentinels: so many, from <extra_id_0> on (T5 has 100)."})
    lowercase: bool = field(default=False, metadata={"help": "Lower the case; with wordpiece, drop accents too."})
    model_max_length: int = field(default=512, metadata={"help": "Longest input of the model to come, in tokens."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace a tokenizer in the folder."})


def _roberta_layout(ids: dict[str, int]) -> Any:
    return processors.RobertaProcessing(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), trim_offsets=True, add_prefix_space=False
    )


def _bert_layout(ids: dict[str, int]) -> Any:
    return processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )


def _xlm_roberta_layout(ids: dict[str, int]) -> Any:
    return processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])],
    )


@dataclass(frozen=True)
class _Recipe:
    """What belongs to an algorithm: its special tokens in the order of their ids, and its parts."""

    special: dict[str, str]  # the token's name in `transformers` -> the token
    backend: Callable[[TokenizerFlags], Tokenizer]
    trainer: Callable[[TokenizerFlags, list[str | AddedToken]], Any]
    layout: Callable[[dict[str, int]], Any]
    token_types: bool = False


def _byte_level_bpe(flags: TokenizerFlags) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if flags.lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_level_bpe_trainer(flags: TokenizerFlags, special: list[str | AddedToken]) -> Any:
    return trainers.BpeTrainer(
        vocab_size=flags.vocab_size,
        min_frequency=flags.min_frequency,
        special_tokens=special,
        # All 256 bytes, so that no text has an unknown token.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _wordpiece(flags: TokenizerFlags) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=flags.lowercase, strip_accents=flags.lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _wordpiece_trainer(flags: TokenizerFlags, special: list[str | AddedToken]) -> Any:
    return trainers.WordPieceTrainer(
        vocab_size=flags.vocab_size,
        min_frequency=flags.min_frequency,
        special_tokens=special,
        show_progress=False,
    )


def _unigram(flags: TokenizerFlags) -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    lowercase = [normalizers.Lowercase()] if flags.lowercase else []
    # SentencePiece's defaults: compatible forms joined, one space where there are more.
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), *lowercase, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def _unigram_trainer(flags: TokenizerFlags, special: list[str | AddedToken]) -> Any:
    return trainers.UnigramTrainer(
        vocab_size=flags.vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False
    )


_ROBERTA = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
_BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
RECIPES: dict[str, _Recipe] = {
    "byte-level-bpe": _Recipe(_ROBERTA, _byte_level_bpe, _byte_level_bpe_trainer, _roberta_layout),
    "wordpiece": _Recipe(_BERT, _wordpiece, _wordpiece_trainer, _bert_layout, token_types=True),
    "unigram": _Recipe(_ROBERTA, _unigram, _unigram_trainer, _xlm_roberta_layout),
}


def train_tokenizer(texts: Iterable[list[str]], *, flags: TokenizerFlags) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on lists of texts; a corpus that is too small for `vocab_size` gives what it holds."""
    recipe = RECIPES[flags.algorithm]
    extra = [token.strip() for token in (flags.special_tokens or "").split(",") if token.strip()]
    extra += [f"<extra_id_{number}>" for number in range(flags.extra_ids)]
    # Like RoBERTa's, a mask stands for a word with the space before it.
    mask = AddedToken(recipe.special["mask_token"], lstrip=not recipe.token_types, special=True)
    special = [mask if token == mask.content else token for token in dict.fromkeys([*recipe.special.values(), *extra])]
    backend = recipe.backend(flags)
    try:
        backend.train_from_iterator(texts, recipe.trainer(flags, special))
    except Exception as error:  # the trainers raise nothing more special
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise UsageError(
            f"The {flags.algorithm} trainer cannot make {flags.vocab_size} tokens of this text ({reason}): "
            "choose another --vocab_size, or give more text."
        ) from error
    size = backend.get_vocab_size()
    if size > flags.vocab_size:
        raise UsageError(
            f"--vocab_size {flags.vocab_size} is too small: the special tokens and single characters alone are {size}."
        )
    if size < flags.vocab_size:
        logger.warning(
            "The tokenizer has %d tokens, not %d: the text holds no more%s. Give the model's config this vocab_size.",
            size,
            flags.vocab_size,
            "" if flags.algorithm == "unigram" else f" that occur {flags.min_frequency} times",
        )
    backend.post_processor = recipe.layout(backend.get_vocab())
    names: dict[str, str | AddedToken] = {**recipe.special, "mask_token": mask}
    if not recipe.token_types:
        names |= {"cls_token": names["bos_token"], "sep_token": names["eos_token"]}
    inputs = (
        ["input_ids", "token_type_ids", "attention_mask"] if recipe.token_types else ["input_ids", "attention_mask"]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=flags.model_max_length,
        model_input_names=inputs,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        additional_special_tokens=extra,
        **names,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer's files so that Transformers 4 opens them too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if config.get("tokenizer_class") != "TokenizersBackend":
        return
    # Version 5 reads both spellings; version 4 knows neither this class nor a list under the other name.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def run(flags: TokenizerFlags) -> Path:
    """Train, save, open what was saved, and return the folder."""
    from transformers import AutoTokenizer

    folder = _checked(flags)
    texts = load_texts(
        files=flags.train_file,
        dataset_name=flags.dataset_name,
        dataset_config_name=flags.dataset_config_name,
        text_column=flags.text_column,
        max_samples=flags.max_train_samples,
    )
    logger.info("Training a %s tokenizer on %d texts.", flags.algorithm, len(texts))
    tokenizer = train_tokenizer((rows["text"] for rows in texts.iter(batch_size=1000)), flags=flags)
    save_tokenizer(tokenizer, folder)
    opened = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sample = texts[: min(100, len(texts))]["text"]
    if opened(sample)["input_ids"] != tokenizer(sample)["input_ids"]:
        raise DataError(f"The tokenizer in '{folder}' gives other ids than the one that was saved: do not use it.")
    logger.info("Saved a tokenizer of %d tokens in '%s'.", len(tokenizer), folder)
    return folder


def _checked(flags: TokenizerFlags) -> Path:
    if flags.algorithm not in RECIPES:
        raise UsageError(f"--algorithm is '{flags.algorithm}': it must be one of {', '.join(RECIPES)}.")
    for name in ("vocab_size", "min_frequency", "model_max_length"):
        if getattr(flags, name) < 1:
            raise UsageError(f"--{name} is {getattr(flags, name)}: it must be at least 1.")
    if flags.extra_ids < 0:
        raise UsageError(f"--extra_ids is {flags.extra_ids}: it must be 0 or more.")
    held = [name for name in VOCABULARIES if flags.output_dir and (Path(flags.output_dir) / name).exists()]
    if held and not flags.overwrite_output_dir:
        raise UsageError(
            f"'{flags.output_dir}' holds a tokenizer already ({listed(held)}): choose another --output_dir, or "
            "--overwrite_output_dir."
        )
    return output_folder(flags.output_dir)
