"""How many operations a training step must do, counted from the model; XLA counts the body of a loop once.

For each token 6 for every weight that multiplies it, 2 forwards and 4 backwards (Kaplan et al. 2020,
https://arxiv.org/abs/2001.08361, section 2.1), and 12 times the width for every token that it is compared with in every
layer (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). Tables of which rows are taken cost
nothing; a projection to the vocabulary costs at the positions that are scored. What is computed again to save memory
does not count. All tokens of a row are compared, although causal and windowed attention needs fewer, and a head's small
layers count on all of them. Beside all products in the program of a step (256 wide, two layers, rows of 64) this is
1.00 for GPT-Neo, T5 and BART, 1.01 for ViT and ELECTRA, 1.03 for BERT.
"""

import math
from collections.abc import Mapping
from typing import Any

from distaff.core.tree import flatten
from distaff.tasks._planned import Planned


def step_flops(planned: Planned) -> float | None:
    """Return the operations of a step over all devices; None for models that are no transformers."""
    models = getattr(planned.model, "models", None)
    if models is not None:
        # ELECTRA: the generator scores the masked positions.
        parts = [row_flops(models["generator"], planned.batch, planned.scored)]
        parts.append(row_flops(models["discriminator"], planned.batch, 0))
    else:
        parts = [row_flops(planned.model, planned.batch, planned.scored)]
    return None if None in parts else planned.rows * math.fsum(part for part in parts if part is not None)


def lengths(model: Any, batch: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens a row that a model's stacks see: of "encoder" and "decoder", or of "" where there is one."""
    if "pixel_values" in batch:
        height, width = batch["pixel_values"].shape[2:]
        side = model.config.patch_size
        tall, wide = (side, side) if isinstance(side, int) else side
        return {"": (height // tall) * (width // wide) + 1}
    length = batch["input_ids"].shape[1]
    if not getattr(model.config, "is_encoder_decoder", False):
        return {"": length}
    written = batch["labels"].shape[1] if "label_weights" in batch else length
    return {"encoder": length, "decoder": written}


def row_flops(model: Any, batch: Mapping[str, Any], scored: int) -> float | None:
    """Return the operations of a row, None for a model without attention."""
    config = model.config
    if not hasattr(config, "num_attention_heads"):
        return None
    tokens = lengths(model, batch)
    axes, total, heads, tables = model.logical_axes(), 0.0, 0, 0
    for path, leaf in flatten(model.params_shape_tree).items():
        size = math.prod(leaf.shape)
        if "vocab" in axes[path]:
            heads += size * path.endswith("/kernel")
            tables += size * path.endswith("/embedding")
        elif path.endswith("/kernel"):
            total += 6 * size * tokens.get(_side(path), next(iter(tokens.values())))
    # Without a projection of its own, the table of words is one.
    total += 6 * (heads or tables) * scored
    return total + 12 * _width(config) * _comparisons(config, tokens)


def _side(path: str) -> str:
    """Return which stack's tokens a kernel multiplies: keys and values of the encoder's are made for the decoder."""
    read = path.endswith(("cross_attention/key/kernel", "cross_attention/value/kernel"))
    return "decoder" if "decoder" in path.split("/") and not read else "encoder"


def _width(config: Any) -> int:
    """Return the width of all heads together."""
    head = getattr(config, "d_kv", None)
    return config.hidden_size if head is None else head * config.num_attention_heads


def _comparisons(config: Any, tokens: Mapping[str, int]) -> int:
    """Return how many pairs of tokens are compared, over all layers."""
    layers = config.num_hidden_layers
    if "decoder" not in tokens:
        return layers * next(iter(tokens.values())) ** 2
    names = ("num_decoder_layers", "decoder_layers")
    below = next(getattr(config, name) for name in names if getattr(config, name, None))
    read, written = tokens["encoder"], tokens["decoder"]
    return layers * read**2 + below * (written**2 + written * read)
