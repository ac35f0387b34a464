"""Cases of pipelines: models, tokenizers and inputs here, what Transformers' pipelines answered in `pipelines.json`.

Weights are a function of name and shape, as in `cases.py`, and larger, so that pieces get different labels.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FILE = Path(__file__).with_name("pipelines.json")

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "initializer_range": 0.5,
}
TAGS = ["I-PER", "O", "B-PER", "I-LOC", "B-LOC", "MISC"]
TAGGED = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: number for number, tag in enumerate(TAGS)}}
PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] a b c d e n r s t u z ü ##a ##b ##c ##d ##e ##n ##r ##s ##t ##ü . , - basel is ##el ##ada ##t##r".split()  # fmt: skip
BERT = {**SHAPE, "vocab_size": len(PIECES), "pad_token_id": 0}
MERGES = [("Ġ", "a"), ("Ġ", "B"), ("a", "s"), ("ĠB", "as"), ("e", "l"), ("t", "t"), ("e", "r"), ("Ġa", "n")]
BPE_SIZE = 5 + 256 + len(MERGES)
ROBERTA = {
    **SHAPE,
    "vocab_size": BPE_SIZE,
    "max_position_embeddings": 50,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": BPE_SIZE,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 48,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
NLI = ["contradiction", "neutral", "entailment"]
JUDGED = {"id2label": dict(enumerate(NLI)), "label2id": {name: number for number, name in enumerate(NLI)}}
# Name -> (model type, PyTorch's class, fields of its config).
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-tags": ("bert", "BertForTokenClassification", BERT | TAGGED),
    "roberta-tags": ("roberta", "RobertaForTokenClassification", ROBERTA | TAGGED),
    "bert": ("bert", "BertModel", BERT),
    "roberta": ("roberta", "RobertaModel", ROBERTA),
    "bert-mask": ("bert", "BertForMaskedLM", BERT),
    "gpt2": ("gpt2", "GPT2LMHeadModel", GPT2),
    "bert-nli": ("bert", "BertForSequenceClassification", BERT | JUDGED),
    "roberta-nli": ("roberta", "RobertaForSequenceClassification", ROBERTA | JUDGED),
    "bert-number": ("bert", "BertForSequenceClassification", BERT | {"num_labels": 1, "problem_type": "regression"}),
    "bert-shares": ("bert", "BertForSequenceClassification", BERT | {"num_labels": 1}),
}
TEXTS = [
    "Anna is in Basel.",
    "Zürich, Basel-Land & Bern: 4000 cats sat",
    "a",
    "Ernst Test, Tessa!  e\tb",
    "bcd ctr basel bada Basel is ünst.",
]
PAIRS = [{"text": "Anna is in Basel.", "text_pair": "bada"}, {"text": "a b c", "text_pair": "Zürich test"}]
SPLIT = [["Anna", "is", "in", "Basel", "."], ["Zürich", "-", "Bern"]]
STRATEGIES = ("none", "simple", "first", "average", "max")
# Name -> (task, model, inputs, settings).
CASES: dict[str, tuple[str, str, list[Any], dict[str, Any]]] = {
    **{
        f"{model}-{strategy}": ("token-classification", model, TEXTS, {"aggregation_strategy": strategy})
        for model in ("bert-tags", "roberta-tags")
        for strategy in STRATEGIES
    },
    "everything": (
        "token-classification",
        "bert-tags",
        TEXTS,
        {"aggregation_strategy": "first", "ignore_labels": ["PER"]},
    ),
    **{
        f"split-{strategy}": (
            "token-classification",
            "bert-tags",
            SPLIT,
            {"aggregation_strategy": strategy, "is_split_into_words": True},
        )
        for strategy in ("none", "average")
    },
    **{f"features-{model}": ("feature-extraction", model, ["Anna is", "a"], {}) for model in ("bert", "roberta")},
    "mask": ("fill-mask", "bert-mask", ["anna is in [MASK].", "[MASK] cats"], {"top_k": 4}),
    **{
        f"classes-{model}": ("text-classification", model, TEXTS, {"top_k": None})
        for model in ("bert-nli", "roberta-nli")
    },
    **{f"pairs-{model}": ("text-classification", model, PAIRS, {"top_k": 2}) for model in ("bert-nli", "roberta-nli")},
    "number": ("text-classification", "bert-number", TEXTS, {"top_k": 1}),
    "share": ("text-classification", "bert-shares", TEXTS, {"top_k": 1}),
    "logits": ("text-classification", "bert-nli", TEXTS, {"top_k": None, "function_to_apply": "none"}),
    "labels": ("zero-shot-classification", "bert-nli", TEXTS, {"candidate_labels": "cats, Basel, rest"}),
    "labels-one": ("zero-shot-classification", "bert-nli", TEXTS, {"candidate_labels": ["cats"]}),
    "labels-each": (
        "zero-shot-classification",
        "roberta-nli",
        ["Anna", "a"],
        {"candidate_labels": ["cats", "Basel"], "multi_label": True, "hypothesis_template": "{} or"},
    ),
    "text": (
        "text-generation",
        "gpt2",
        ["Basel and", "a"],
        {"max_new_tokens": 6, "do_sample": False, "return_full_text": False},
    ),
}
# Ways from the tokens of a text to a vector, as sentence-transformers writes them.
POOLING = {
    "mean": {"pooling_mode_mean_tokens": True},
    "cls": {"pooling_mode_cls_token": True},
    "max_and_mean": {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
    "root": {"pooling_mode_mean_sqrt_len_tokens": True},
    "weighted": {"pooling_mode_weightedmean_tokens": True},
    "last": {"pooling_mode": "lasttoken"},
}


def tokenizer(kind: str) -> Any:
    """Return a tokenizer of word pieces ("bert") or of bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if kind == "bert":
        vocabulary = {piece: number for number, piece in enumerate(PIECES)}
        core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        core.normalizer = normalizers.BertNormalizer(strip_accents=False)
        core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        names = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
        core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, MERGES))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        names = {"unk": "<unk>", "pad": "<pad>", "eos": "</s>"}
        if kind == "roberta":
            core.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
            names |= {"cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **{f"{name}_token": word for name, word in names.items()})


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight called `name`."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if len(shape) == 1:  # small biases: what is said of a piece depends on the piece
        values = 0.05 * values + (name.endswith("weight"))
    return (0.6 * values if len(shape) > 1 else values).astype(np.float32)


def write(name: str, keys: dict[str, list[int]], folder: Path) -> Path:
    """Write config, weights and tokenizer of a model."""
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    model_type, class_name, fields = MODELS[name]
    config = AutoConfig.for_model(model_type, **fields)
    config.architectures = [class_name]
    config.save_pretrained(folder)
    tokenizer(model_type).save_pretrained(folder)
    state = {key: tensor(key, tuple(shape)) for key, shape in keys.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_pooling(folder: Path, pooling: dict[str, Any], *, normalize: bool, limit: int | None = None) -> None:
    """Write beside a model what sentence-transformers writes."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in zip(kinds, paths)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit, "do_lower_case": False}))


def read() -> dict[str, Any]:
    """Return what `make_pipelines.py` stored: "keys" by model, "answers" by case, "vectors" by pooling."""
    return json.loads(FILE.read_text())
