"""Causal language modeling: GPT-2, GPT-Neo, OPT, from scratch or from a checkpoint.

    distaff tokenizer train --train_file train.txt --vocab_size 2000 --output_dir play-tokenizer
    distaff train clm --output_dir play --model_type gpt2 --tokenizer_name play-tokenizer \\
        --config_overrides n_layer=4,n_embd=192,n_head=4,n_positions=256,attn_pdrop=0.0 \\
        --train_file train.txt --validation_file validation.txt --block_size 256 --per_device_train_batch_size 8 \\
        --max_steps 2400 --learning_rate 3e-3 --warmup_steps 100 --lr_scheduler_type cosine --weight_decay 0.1 \\
        --adam_beta2 0.99

An evaluation logs the loss a token, its perplexity, and the nats a character: the loss over the characters of the
tokens that were scored, which compares models of different vocabularies.

On Tiny Shakespeare these flags end at 1.51 nats a character of the validation text (3.87 a token) after 14 epochs; 1.73
after step 400, 1.57 after step 1,200. A step took 0.4 s on two shared cores.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distaff.core.errors import UsageError
from distaff.data.columns import pad_rows
from distaff.data.documents import prompting_tokenizer, token_characters
from distaff.models._causal import FlaxCausalModel
from distaff.models.auto import FlaxAutoModelForCausalLM
from distaff.nn.vocabulary import cross_entropy_sum, score_sums
from distaff.tasks import _text as text
from distaff.tasks._flags import flag
from distaff.tasks._text_data import DocumentFlags, Rows

# The old script's limit where neither tokenizer nor model names one.
LONGEST_BY_DEFAULT = 1024


@dataclass(kw_only=True)
class ClmFlags(DocumentFlags):
    """Flags of `distaff train clm` and `distaff eval clm`."""

    block_size: int | None = flag(None, "Tokens a row, by default as many as tokenizer and model allow, at most 1,024.")
    segment_documents: bool = flag(
        False, "Keep the documents of a row apart: attention stays inside one, whose positions count from 0."
    )


# Loss.


def clm_loss(
    module, params, batch: dict[str, jax.Array], rng: jax.Array | None, *, eos_token_id: int | None = None
) -> dict[str, tuple[Any, Any]]:
    """Sum the cross-entropy of each next token of `input_ids` `[batch, length]`; `weights` `[batch]` are the rows'.

    With `eos_token_id` each row is cut behind these tokens into documents that know nothing of each other: the first
    token of one is predicted by nothing, so it is not scored. Logits exist for a few positions at a time.
    """
    input_ids = batch["input_ids"]
    weights = jnp.broadcast_to(batch["weights"][:, None], input_ids[:, 1:].shape)
    inputs: dict[str, jax.Array] = {"input_ids": input_ids}
    if eos_token_id is not None:
        segments, inputs["position_ids"] = documents_of(input_ids, eos_token_id)
        inputs["attention_mask"] = segments[:, :, None] == segments[:, None, :]  # [batch, queries, keys]
        weights = weights * (segments[:, 1:] == segments[:, :-1])
    outputs = text.with_dropout(module, params, rng)(**inputs, lazy_logits=True)
    predictions, labels = outputs.logits.at(slice(0, -1)), input_ids[:, 1:]
    count = jnp.sum(weights)
    if rng is not None:
        return {"loss": (cross_entropy_sum(predictions, labels, weights), count)}
    loss, hits = score_sums(predictions, labels, weights)
    sums = {"loss": (loss, count), "accuracy": (hits, count)}
    if "characters" in batch:
        sums["nats_per_character"] = (loss, jnp.sum(batch["characters"][:, 1:] * weights))
    return sums


def documents_of(input_ids: jax.Array, eos_token_id: int) -> tuple[jax.Array, jax.Array]:
    """Return the number of each token's document in its row, and its place in it; both `[batch, length]` int32."""
    ends = (input_ids == eos_token_id).astype(jnp.int32)
    segments = jnp.cumsum(ends, axis=1) - ends  # an eos token belongs to the document that it ends
    places = lax.broadcasted_iota(jnp.int32, input_ids.shape, 1)
    begins = jnp.pad(ends[:, :-1], ((0, 0), (1, 0))) * places
    return segments, places - lax.cummax(begins, axis=1)


# Data.


@dataclass(frozen=True)
class ClmCollate:
    """Makes batches of rows of tokens; `characters` [vocab] says how many characters of the text a token stands for."""

    characters: np.ndarray

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return `input_ids` [batch, length], `weights` [batch] and, in evaluation, `characters` [batch, length]."""
        input_ids, _ = pad_rows(rows["input_ids"], length=length, fill=0)
        batch = {"input_ids": input_ids, "weights": weights}
        return batch if epoch else {**batch, "characters": self.characters[input_ids]}


def clm_rows(flags: ClmFlags, tokenizer, model) -> Rows:
    """Return how texts become rows of `--block_size` tokens."""
    causal = isinstance(model, FlaxCausalModel)
    if not causal and not getattr(model.config, "is_decoder", False):
        raise UsageError(
            f"A {model.config.model_type} model sees the tokens that it is to predict: train it with 'distaff train "
            "mlm', or add --config_overrides is_decoder=true."
        )
    if flags.segment_documents and not causal:
        raise UsageError(f"--segment_documents is not for {model.config.model_type} models: leave it out.")
    longest = model.longest_input
    block = text.block_size(flags.block_size, tokenizer, longest, flag_name="--block_size", most=LONGEST_BY_DEFAULT)
    eos = tokenizer.eos_token_id if flags.segment_documents else None
    return Rows(
        block=block,
        collate=ClmCollate(token_characters(tokenizer)),
        loss_fn=partial(clm_loss, model.module, eos_token_id=eos),
        tokens=lambda batch: int(batch["weights"].sum()) * block,
        advice="lower --block_size to at most {total}",
    )


RECIPE = text.TextRecipe(
    name="clm",
    task="text-generation",
    model=partial(text.model_of, FlaxAutoModelForCausalLM),
    rows=clm_rows,
    saved_tokenizer=prompting_tokenizer,
)
plan = partial(text.plan, RECIPE)
train = partial(text.train, RECIPE)
evaluate_only = partial(text.evaluate_only, RECIPE)
