"""Masked language modeling: BERT, RoBERTa, XLM-RoBERTa, from scratch or from a checkpoint.

    distaff train mlm --output_dir roberta-als --model_type roberta --tokenizer_name roberta-als \\
        --train_file a.txt --max_seq_length 128 --per_device_train_batch_size 4 --learning_rate 3e-4 \\
        --warmup_steps 1000 --num_train_epochs 8

`distaff quickstart` runs it on the text that comes with Python; README.md says what it reaches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from distaff.core.errors import UsageError
from distaff.data.masking import MlmCollate, MlmMasking
from distaff.data.text import tokenize_blocks, tokenize_lines
from distaff.models.auto import FlaxAutoModelForMaskedLM
from distaff.nn.vocabulary import cross_entropy_sum, score_sums
from distaff.tasks import _recipe as recipes
from distaff.tasks import _text as text
from distaff.tasks._flags import ModelFlags, TextFlags, TrainingFlags, flag
from distaff.tasks._text_data import Rows, TextData, Texts, batch_texts


@dataclass(kw_only=True)
class MlmFlags(ModelFlags, TextFlags, TrainingFlags):
    """Flags of `distaff train mlm` and `distaff eval mlm`."""

    line_by_line: bool = flag(False, "A row for each text, instead of texts joined and cut into full rows.")
    pad_to_max_length: bool = flag(True, "With --line_by_line: pad to the full length, not to the nearest of a few.")
    mlm_probability: float = flag(0.15, "Share of the tokens that are masked.")
    whole_word_mask: bool = flag(False, "Mask words with all their tokens.")

    def check_texts(self) -> None:
        """Raise `UsageError` for values that no texts can be read with."""
        super().check_texts()
        if self.streaming and self.line_by_line:
            raise UsageError("--streaming joins texts into full rows: leave --line_by_line out.")


# Loss.


def mlm_loss(module, params, batch: dict[str, jax.Array], rng: jax.Array | None) -> dict[str, tuple[Any, Any]]:
    """Sum the cross-entropy of the hidden tokens over `masked_weights` `[batch, count]`.

    Logits are computed at `masked_positions` `[batch, count]` alone: `[batch, count, vocab]`, a fifth of them all.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    outputs = module.apply(
        {"params": params},
        **inputs,
        masked_positions=batch["masked_positions"],
        deterministic=rng is None,
        lazy_logits=True,
        rngs=None if rng is None else {"dropout": rng},
    )
    labels, weights = batch["masked_labels"], batch["masked_weights"]
    if rng is not None:
        return {"loss": (cross_entropy_sum(outputs.logits, labels, weights), jnp.sum(weights))}
    loss, hits = score_sums(outputs.logits, labels, weights)
    return {"loss": (loss, jnp.sum(weights)), "accuracy": (hits, jnp.sum(weights))}


# Data.


def mlm_rows(flags: MlmFlags, tokenizer, model) -> Rows:
    """Return how texts become rows of `--max_seq_length` tokens, some of them masked."""
    length = recipes.row_length(flags, tokenizer, model.longest_input)
    advice = "lower --max_seq_length to at most {total}"
    return Rows(
        block=length,
        collate=masking(flags, tokenizer, length),
        loss_fn=partial(mlm_loss, model.module),
        tokens="attention_mask",
        advice=advice if flags.streaming else f"{advice}, or use --line_by_line",
        unscored="give more text, or a higher --mlm_probability",
    )


def masking(flags: MlmFlags, tokenizer, length: int, collation: type[MlmCollate] = MlmCollate) -> MlmCollate:
    """Return what masks rows of at most `length` tokens."""
    chosen = MlmMasking.from_tokenizer(
        tokenizer, max_length=length, probability=flags.mlm_probability, whole_word=flags.whole_word_mask
    )
    return collation.from_tokenizer(tokenizer, masking=chosen, seed=flags.seed)


def make_data(flags: MlmFlags, tokenizer, rows: Rows, *, vocab_size: int, sizes: tuple[int, int]) -> TextData:
    """Read, tokenise and batch the texts; `sizes` are the rows of a training and of an evaluation batch."""

    def cut(texts, files: str | None):
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "whole_word": flags.whole_word_mask,
            "num_proc": flags.preprocessing_num_workers,
            "overwrite_cache": flags.overwrite_cache,
        }
        if flags.line_by_line:
            return tokenize_lines(texts, max_length=rows.block, **options)
        return tokenize_blocks(texts, block=rows.block, advice=rows.advice, **options)

    return batch_texts(
        flags,
        Texts(flags),
        rows,
        cut=cut,
        joining=lambda files: tokenizer,
        vocab_size=vocab_size,
        sizes=sizes,
        pad_to_max_length=flags.pad_to_max_length or not flags.line_by_line,
        whole_word=flags.whole_word_mask,
    )


RECIPE = text.TextRecipe(
    name="mlm", task="fill-mask", model=partial(text.model_of, FlaxAutoModelForMaskedLM), rows=mlm_rows, data=make_data
)
plan = partial(text.plan, RECIPE)
train = partial(text.train, RECIPE)
evaluate_only = partial(text.evaluate_only, RECIPE)
