"""Configs and data of the benchmarks, the same for us and for the peers: sizes, seeds and distributions."""

import json
import resource
import statistics
import sys
import time

import datasets
import numpy as np

# RoBERTa of 6 layers x 384, float32, dropout on; 16 rows of 128 tokens, 15 % of them masked.
MLM = {
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
}
# roberta-base: 124.7 million parameters, 498 MB.
BASE = {**MLM, "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
ROWS, LENGTH, COUNT, LEARNING_RATE = 16, 128, 24, 1e-4

# GPT-2 of 6 layers x 384, float32, dropout on; 8 rows of 256 tokens.
CLM = {
    "n_layer": 6,
    "n_embd": 384,
    "n_head": 6,
    "vocab_size": 50257,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
CLM_ROWS, CLM_LENGTH = 8, 256
# T5 of 4 + 4 layers x 256, float32, dropout on; 8 rows of 256 tokens and targets of 64.
T5 = {
    "num_layers": 4,
    "num_decoder_layers": 4,
    "d_model": 256,
    "num_heads": 4,
    "d_kv": 64,
    "d_ff": 1024,
    "vocab_size": 32128,
    "dropout_rate": 0.1,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
T5_ROWS, T5_LENGTH, T5_TARGETS = 8, 256, 64


# ViT of 6 layers x 384, float32, dropout on; 8 images of 224 x 224.
VIT = {
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "image_size": 224,
    "patch_size": 16,
    "num_labels": 1000,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
VIT_ROWS = 8


# BERT of 4 layers x 256, float32, dropout on; 32 texts, of 128 tokens or of about 27.
GLUE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 30522,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "num_labels": 2,
}
GLUE_ROWS, GLUE_LENGTH, GLUE_MEAN = 32, 128, 27.0


def glue_texts(count: int = 4, *, full: bool = False) -> datasets.Dataset:
    """Texts of `count` batches, of the full length or of lengths as those of GLUE: log-normal."""
    rng = np.random.RandomState(0)
    rows = GLUE_ROWS * count
    spread = 0.6
    lengths = np.round(rng.lognormal(np.log(GLUE_MEAN) - spread**2 / 2, spread, rows))
    lengths = np.full(rows, GLUE_LENGTH) if full else np.clip(lengths, 5, GLUE_LENGTH).astype(int)
    ids = [rng.randint(1000, GLUE["vocab_size"], length) for length in lengths]
    targets = rng.randint(0, GLUE["num_labels"], rows).astype(np.int32)
    features = {"input_ids": datasets.List(datasets.Value("int32")), "target": datasets.Value("int32")}
    return datasets.Dataset.from_dict({"input_ids": ids, "target": targets}, datasets.Features(features))


def vit_batches(count: int = 4) -> list[dict[str, np.ndarray]]:
    """Random pixels and labels."""
    rng = np.random.RandomState(0)
    shape = VIT_ROWS, 3, VIT["image_size"], VIT["image_size"]
    return [
        {
            "pixel_values": rng.randn(*shape).astype(np.float32),
            "labels": rng.randint(0, VIT["num_labels"], VIT_ROWS).astype(np.int32),
        }
        for _ in range(count)
    ]


def clm_batches(count: int = 4) -> list[dict[str, np.ndarray]]:
    """Full rows of random tokens."""
    rng = np.random.RandomState(0)
    weights = np.ones(CLM_ROWS, np.float32)
    shape = CLM_ROWS, CLM_LENGTH
    return [
        {"input_ids": rng.randint(0, CLM["vocab_size"] - 1, shape).astype(np.int32), "weights": weights}
        for _ in range(count)
    ]


def t5_batches(count: int = 4) -> list[dict[str, np.ndarray]]:
    """Full rows of random tokens on both sides."""
    rng = np.random.RandomState(0)
    batches = []
    for _ in range(count):
        labels = rng.randint(2, T5["vocab_size"] - 100, (T5_ROWS, T5_TARGETS)).astype(np.int32)
        batches.append(
            {
                "input_ids": rng.randint(2, T5["vocab_size"] - 100, (T5_ROWS, T5_LENGTH)).astype(np.int32),
                "attention_mask": np.ones((T5_ROWS, T5_LENGTH), np.int32),
                "labels": labels,
                "label_weights": np.ones(labels.shape, np.float32),
                "decoder_input_ids": np.pad(labels[:, :-1], ((0, 0), (1, 0))),
            }
        )
    return batches


def mlm_batches(count: int = 4, *, everywhere: bool = False) -> list[dict[str, np.ndarray]]:
    """Batches with logits at `COUNT` masked positions a row, or at every position for the plain variant."""
    rng = np.random.RandomState(0)
    batches = []
    for _ in range(count):
        ids = rng.randint(5, MLM["vocab_size"] - 2, (ROWS, LENGTH)).astype(np.int32)
        masked = rng.rand(ROWS, LENGTH) < 0.15
        if not everywhere:
            masked &= np.cumsum(masked, axis=1) <= COUNT
        slots = LENGTH if everywhere else COUNT
        positions = np.zeros((ROWS, slots), np.int32)
        weights = np.zeros((ROWS, slots), np.float32)
        for row in range(ROWS):
            places = np.arange(LENGTH) if everywhere else np.flatnonzero(masked[row])
            positions[row, : len(places)] = places
            weights[row, : len(places)] = masked[row, places]
        batches.append(
            {
                "input_ids": np.where(masked, MLM["vocab_size"] - 1, ids).astype(np.int32),
                "attention_mask": np.ones((ROWS, LENGTH), np.int32),
                "masked_positions": positions,
                "masked_labels": np.take_along_axis(ids, positions, axis=1),
                "masked_weights": weights,
            }
        )
    return batches


def peak_mb() -> float:
    """The most memory that this process held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(function) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def emit(**values) -> None:
    """Print the result as the last line, which `run.py` reads."""
    print(json.dumps(values))
    sys.stdout.flush()


def median(seconds: list[float]) -> float:
    """The median, rounded to 0.1 ms."""
    return round(statistics.median(seconds), 4)
