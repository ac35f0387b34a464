"""What the recipes share in which an encoder reads damaged text and a decoder writes: flags, loss, preview."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from distaff.core.errors import UsageError
from distaff.nn.vocabulary import cross_entropy_sum, score_sums
from distaff.tasks import _text as text
from distaff.tasks._flags import TextFlags, flag
from distaff.tasks._text_data import DocumentFlags


@dataclass(kw_only=True)
class DenoiseFlags(DocumentFlags, TextFlags):
    """Flags of `distaff train t5-mlm` and `bart-dlm`."""

    preview: int = flag(0, "Print so many pairs of input and target, decoded, and leave.")


def denoise_loss(module, params, batch: dict[str, jax.Array], rng: jax.Array | None) -> dict[str, tuple[Any, Any]]:
    """Sum the cross-entropy of `labels` `[batch, targets]` over `label_weights`; logits exist a few at a time."""
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    outputs = text.with_dropout(module, params, rng)(*(batch[name] for name in names), lazy_logits=True)
    labels, weights = batch["labels"], batch["label_weights"]
    count = jnp.sum(weights)
    if rng is not None:
        return {"loss": (cross_entropy_sum(outputs.logits, labels, weights), count)}
    loss, hits = score_sums(outputs.logits, labels, weights)
    return {"loss": (loss, count), "accuracy": (hits, count)}


def count_tokens(batch: dict[str, Any]) -> int:
    """Return the tokens of both sides of a host batch."""
    return int(batch["attention_mask"].sum() + (batch["label_weights"] > 0).sum())


def start_token(model) -> int:
    """Return what the decoder starts from, as the config says."""
    start = model.decoder_start_token_id
    if start is None:
        raise UsageError(
            f"The config of this {model.config.model_type} model has no decoder_start_token_id: add it by "
            "--config_overrides."
        )
    return start


def train(recipe: text.TextRecipe, flags: Any) -> int:
    """Train, or with --preview only show what would be trained on; return the exit code."""
    if flags.preview < 0:
        raise UsageError(f"--preview is {flags.preview}: it must be 0 or more.")
    return preview(recipe, flags) if flags.preview else text.train(recipe, flags)


def preview(recipe: text.TextRecipe, flags: Any) -> int:
    """Print the first training pairs."""
    flags.check_numbers()
    flags.check_texts()
    flags.do_train, flags.do_eval = True, False
    tokenizer, model, rows = text.prepare(recipe, flags)
    sizes = (flags.preview, flags.preview)
    data = text.make_data(flags, tokenizer, rows, vocab_size=model.config.vocab_size, sizes=sizes)
    batch = data.train(0)
    for index in range(flags.preview):
        read = batch["input_ids"][index][batch["attention_mask"][index] > 0]
        written = batch["labels"][index][batch["label_weights"][index] > 0]
        for name, ids in (("input", read), ("target", written)):
            print(f"{name:>6} {index + 1}: {tokenizer.decode(ids)!r}")
    return 0
