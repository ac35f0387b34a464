"""Small tokenizers and texts that several tests share."""

from functools import cache
from pydoc_data import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


@cache
def reference_lines() -> tuple[str, ...]:
    """Real text: some 9,000 lines of Python's own reference documentation, blank ones left out."""
    return tuple(line for name in sorted(topics.topics) for line in topics.topics[name].split("\n") if line.strip())


@cache
def _trained(kind: str) -> str:
    lines = reference_lines()[:1500]
    if kind == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        backend.train_from_iterator(
            lines, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
        )
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            lines,
            trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
        )
        backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return backend.to_str()


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a new tokenizer like BERT's ("bert", 400 pieces) or RoBERTa's ("roberta", 500 pieces)."""
    backend = Tokenizer.from_str(_trained(kind))
    if kind == "bert":
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            unk_token="[UNK]",
            pad_token="[PAD]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"],
    )
