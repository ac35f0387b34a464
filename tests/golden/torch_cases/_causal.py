"""The inputs of decoder-only families."""

from typing import Any

import numpy as np

# Lengths of the prompts that are continued greedily, padded on the left to one batch.
PROMPTS = (3, 7, 12)
# Labels in each row of the gradient's run: equally many, so that rows count alike.
LABELS = 4


def inputs_of(run: str, config: Any, class_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one run; `mixed` has an unpadded, a right-padded and a left-padded row."""
    rng = np.random.default_rng(11)
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    shape = {"single": (1, 1), "greedy": (len(PROMPTS), max(PROMPTS))}.get(run, (3, 8))
    ids = rng.integers(6, config.vocab_size - 1, shape)  # no special id
    mask = np.ones(shape, np.int64)
    if run in ("mixed", "left_positions"):
        mask[1, 5:] = mask[2, :3] = 0
    elif run == "empty_row":
        mask[1] = mask[2, 6:] = 0
    elif run == "gradient":  # PyTorch keeps the embedding of padding fixed in some families: no loss on it
        mask[1, 5:] = mask[2, 7:] = 0
    elif run == "greedy":
        for row, length in enumerate(PROMPTS):
            mask[row, : max(PROMPTS) - length] = 0
    arrays = {"input_ids": np.where(mask == 1, ids, pad)}
    if run == "positions":
        arrays["position_ids"] = rng.integers(2, config.max_position_embeddings, shape)
    elif run != "single":
        arrays["attention_mask"] = mask
    if run == "left_positions":
        arrays["position_ids"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    if run == "gradient":
        labels = np.full(shape, -100)
        for row in range(len(mask)):
            chosen = rng.choice(np.flatnonzero(mask[row]), LABELS, replace=False)
            labels[row, chosen] = rng.integers(0, config.vocab_size, LABELS)
        arrays["labels"] = labels
    return {name: value.astype(np.int32) for name, value in arrays.items()}
