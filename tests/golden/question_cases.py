"""Cases of question answering: tokenizers, models, questions, logits; what Transformers answered is in `questions.json`.

Weights are a function of name and shape, as in `cases.py`, and large in the head, so that answers are far apart.
"""

import json
import re
import string
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FILE = Path(__file__).with_name("questions.json")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 196,
    "pad_token_id": 0,
}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 196,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
# By model type: PyTorch's class, and fields of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForQuestionAnswering", SIZES),
    "roberta": ("RobertaForQuestionAnswering", SIZES | {"type_vocab_size": 1}),
    "bart": ("BartForQuestionAnswering", BART),
}
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = "who where when what did do was is in the a of on to and that he she it ran saw red green dog cat house river"
STORY = (
    "Ada saw the red house in Zürich, where the river ran green. The dog (a big one) ran to the cat; it was 1842. "
    "She did what she did: the cat's house was red-green and the dog saw it. "
)
EXAMPLES = [
    {"question": "Where was the red house?", "context": STORY[:60]},
    {"question": "Who ran to the cat?", "context": STORY[61:110]},
    {"question": "When was it?", "context": STORY},
    {"question": "What did the dog do on the river?", "context": STORY},
    {"question": "who", "context": "It was a cat and a dog and a cat and a dog."},
]
# First and last token of what is called the answer of the third example, for its loss.
POSITIONS = (20, 24)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"top_k": 4},
    "windows": {"top_k": 3, "max_seq_len": 64, "doc_stride": 16},
    "impossible": {"top_k": 3, "handle_impossible_answer": True, "max_seq_len": 80},
    "pieces": {"top_k": 3, "align_to_words": False, "max_answer_len": 4},
}
# What is made of logits: name -> arguments of run_qa's post-processing.
POSTPROCESSING: dict[str, dict[str, Any]] = {
    "v1": {},
    "v1_few": {"n_best_size": 3, "max_answer_length": 5},
    "v2": {"version_2_with_negative": True},
    "v2_threshold": {"version_2_with_negative": True, "null_score_diff_threshold": 1.5, "n_best_size": 5},
}


def tokenizer(model: str) -> Any:
    """Return a tokenizer of word pieces, or for RoBERTa and BART of bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS))
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    if model == "bert":
        letters = string.ascii_lowercase + string.digits + string.punctuation
        words = [*SPECIALS, *letters, *("##" + letter for letter in letters), *WORDS.split()]
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
        core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "r"), ("o", "g"), ("a", "s"), ("Ġ", "w")]
        words = [*SPECIALS, *alphabet, *(one + two for one, two in merges)]
        vocabulary = {word: number for number, word in enumerate(words)}
        core = Tokenizer(models.BPE(vocabulary, merges))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        core.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2), add_prefix_space=False)
        inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_input_names=inputs,
        model_max_length=192,
        **names,
    )


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight called `name`."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    norm = re.search(r"(layer_?norm|layernorm_\w+)\.weight$", name, re.IGNORECASE)
    return (1 + 0.1 * values if norm else (0.8 if "qa_outputs" in name else 0.2) * values).astype(np.float32)


def fields(model: str) -> dict[str, Any]:
    """Return the fields of a model's config."""
    return {**MODELS[model][1], "vocab_size": len(tokenizer(model))}


def write(model: str, keys: dict[str, list[int]], folder: Path) -> Path:
    """Write config, weights and tokenizer of a model."""
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(model, **fields(model))
    config.architectures = [MODELS[model][0]]
    config.save_pretrained(folder)
    state = {name: tensor(name, tuple(shape)) for name, shape in keys.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(model).save_pretrained(folder)
    return folder


def scored() -> tuple[list[dict[str, Any]], list[dict[str, Any]], np.ndarray, np.ndarray]:
    """Return examples, windows of them with offsets of their context, and logits of starts and ends `[windows, 24]`."""
    rng = np.random.default_rng(3)
    examples = [{"id": f"q{number}", "context": STORY} for number in range(8)]
    windows = []
    for number in range(8):
        for part in range(1 + number % 3):
            places = 30 * part + 5 * np.arange(20)
            offsets = [None] * 4 + [[int(place), int(place) + 4] for place in places[:19]] + [None]
            windows.append({"example_id": f"q{number}", "offset_mapping": offsets})
    start, end = (3 * rng.normal(size=(len(windows), 24)).astype(np.float32) for _ in range(2))
    start[:, 0] += 4
    return examples, windows, start, end


def judged() -> tuple[dict[str, list[str]], dict[str, str], dict[str, float]]:
    """Return references, answers and odds of "no answer" by id."""
    rng = np.random.default_rng(4)
    words = ["The", "cat", "a", "dog's", "house,", "Zürich", "1842", "an", "...", "ran"]
    references, answers, odds = {}, {}, {}
    for number in range(60):
        name = f"q{number}"
        count = int(rng.integers(0, 4))
        references[name] = [" ".join(rng.choice(words, rng.integers(1, 5))) for _ in range(count)]
        answers[name] = " ".join(rng.choice(words, rng.integers(1, 5)))
        if count and rng.random() < 0.4:
            answers[name] = references[name][0].upper()
        odds[name] = round(float(3 * rng.normal() + (2 if not count else -1)), 3)
    return references, answers, odds


def read() -> dict[str, Any]:
    """Return what `make_questions.py` stored."""
    return json.loads(FILE.read_text())
