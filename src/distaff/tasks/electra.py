"""Replaced token detection: ELECTRA's generator and discriminator together (Clark et al. 2020, arXiv:2003.10555).

    distaff train electra --output_dir electra-als --config_name electra-als --tokenizer_name electra-als \\
        --train_file a.txt --max_seq_length 128 --per_device_train_batch_size 16 --learning_rate 5e-4 \\
        --warmup_steps 1000 --num_train_epochs 8

The generator fills masked tokens, its samples replace them, and the discriminator says of every token whether it was
replaced. The folder is that of the discriminator; the generator lies in its `generator/`.

A discriminator that starts from the weights of MiniLM (BERT, 6 x 384; its tensors under model_type electra) says of
93.0 % of the tokens of wikitext-2's validation text rightly whether they were replaced, after 200 steps of 16 x 64
tokens with rate 2e-4; "none was" is right for 86.4 %. From scratch a megabyte of text is little for it: 3 x 128 on Tiny
Shakespeare, 2,000 steps of 32 x 64 with rate 1e-3, is right for 88.20 % where "none was" is for 88.17 %, with a loss of
0.343 nats where the share of replaced tokens alone gives 0.364.
"""

import copy
import logging
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from transformers import AutoConfig

from distaff.core.errors import UsageError
from distaff.core.tree import flatten
from distaff.data.masking import MlmCollate
from distaff.hub import resolve
from distaff.models.auto import FlaxAutoModelForMaskedLM, FlaxAutoModelForPreTraining
from distaff.models.electra import FlaxElectraForMaskedLM, FlaxElectraForPreTraining
from distaff.tasks import _recipe as recipe
from distaff.tasks import _text as text
from distaff.tasks._flags import flag
from distaff.tasks._text_data import Rows
from distaff.tasks.mlm import MlmFlags, make_data, masking

logger = logging.getLogger("distaff")

GENERATOR_FOLDER = "generator"
# What the two models must share for one set of embeddings.
_SHARED = "vocab_size embedding_size max_position_embeddings type_vocab_size".split()


@dataclass(kw_only=True)
class ElectraFlags(MlmFlags):
    """Flags of `distaff train electra` and `distaff eval electra`."""

    model_type: str | None = flag("electra", "Model type; only electra has both models.")
    generator_size: float = flag(0.25, "Size of a new generator, as a part of the discriminator's heads and widths.")
    generator_config_name: str | None = flag(None, "Config of a new generator, instead of --generator_size.")
    discriminator_weight: float = flag(50.0, "Weight of the discriminator's loss beside the generator's (λ).")


# Loss.


def replace_tokens(logits: jax.Array, batch: dict[str, jax.Array], keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the discriminator's ids, and whether each is a replacement, both `[batch, length]`.

    At the masked positions `[batch, count]` of `batch` stands a token drawn from the generator's `logits`
    `[batch, count, vocab]` with the row's key in `keys` `[batch]`. One that is the original token is no replacement.
    """
    ids, positions, used = batch["input_ids"], batch["masked_positions"], batch["masked_used"]
    drawn = jax.vmap(jax.random.categorical)(keys, logits).astype(ids.dtype)  # [batch, count]
    # Slots that are not used lie outside of the row, and what is written there is dropped.
    places = jnp.arange(len(ids))[:, None], jnp.where(used, positions, ids.shape[1])
    original = ids.at[places].set(batch["masked_labels"], mode="drop")
    replaced = ids.at[places].set(drawn, mode="drop")
    return replaced, replaced != original


def join(params: dict[str, Any]) -> dict[str, Any]:
    """Return the generator's parameters, with the embeddings that it shares with the discriminator."""
    generator = params["generator"]
    embeddings = params["discriminator"]["electra"]["embeddings"]
    return {**generator, "electra": {**generator["electra"], "embeddings": embeddings}}


def without_embeddings(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the generator's own part of a tree of its parameters."""
    inner = {name: value for name, value in tree["electra"].items() if name != "embeddings"}
    return {**tree, "electra": inner}


def row_keys(ids: jax.Array, rng: jax.Array | None) -> jax.Array:
    """Return a key for each row of `ids` `[batch, length]`: from the step's, or in evaluation from its tokens.

    So that an evaluation draws the same whatever the size of its batches is.
    """
    if rng is not None:
        return jax.random.split(rng, len(ids))
    place = jax.lax.broadcasted_iota(jnp.uint32, ids.shape, 1)
    hashes = jnp.sum((ids.astype(jnp.uint32) + 1) * (2 * place + 1) * jnp.uint32(2654435761), axis=1, dtype=jnp.uint32)
    return jax.vmap(partial(jax.random.fold_in, jax.random.key(0)))(hashes)


def electra_loss(generator, discriminator, weight: float, params, batch: dict[str, jax.Array], rng: jax.Array | None):
    """Sum the generator's cross-entropy over hidden tokens, and the discriminator's over all real ones.

    "loss" is the mean of the first plus `weight` times the mean of the second: `batch` says by `hidden_share` `[batch]`
    how many hidden tokens there are for a real one, so that both sums can be divided by the hidden ones.
    """
    streams = [None] * 3 if rng is None else list(jax.random.split(rng, 3))

    def apply(module, params, ids, stream, **more):
        inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids") if name in batch}
        rngs = None if stream is None else {"dropout": stream}
        outputs = module.apply({"params": params}, ids, **inputs, **more, deterministic=rng is None, rngs=rngs)
        return outputs.logits.astype(jnp.float32)

    positions = {"masked_positions": batch["masked_positions"]}
    logits = apply(generator, join(params), batch["input_ids"], streams[0], **positions)  # [batch, count, vocab]
    weights = batch["masked_weights"]
    generated = jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, batch["masked_labels"]) * weights)
    # Nothing is learned through the sample (section 3.1 of the paper).
    keys = row_keys(batch["input_ids"], streams[1])
    ids, replaced = replace_tokens(jax.lax.stop_gradient(logits), batch, keys)
    scores = apply(discriminator, params["discriminator"], ids, streams[2])  # [batch, length]
    real = batch["attention_mask"] * batch["row_weights"][:, None]
    losses = optax.sigmoid_binary_cross_entropy(scores, replaced.astype(jnp.float32)) * real
    hidden, tokens = jnp.sum(weights), jnp.sum(real)
    return {
        "loss": (generated + weight * jnp.sum(losses * batch["hidden_share"][:, None]), hidden),
        "generator_loss": (generated, hidden),
        "discriminator_loss": (jnp.sum(losses), tokens),
        "accuracy": (jnp.sum(((scores > 0) == replaced) * real), tokens),
        "always_original": (jnp.sum(~replaced * real), tokens),
    }


def total(weight: float, values: dict[str, float]) -> dict[str, float]:
    """Return the loss from the means of its two parts, and the generator's perplexity."""
    if "generator_loss" not in values:
        return {}
    loss = values["generator_loss"] + weight * values["discriminator_loss"]
    return {"loss": loss, "generator_perplexity": math.exp(min(values["generator_loss"], 700.0))}


# Data.


class ElectraCollate(MlmCollate):
    """Masked rows, and what the discriminator needs: which slots are used, and the weights of whole rows."""

    def __call__(self, rows: Any, *, indices, weights, epoch: int, length: int | None) -> dict[str, np.ndarray]:
        """Return what `MlmCollate` does, `masked_used` `[batch, count]`, `row_weights` and `hidden_share` `[batch]`."""
        batch = super().__call__(rows, indices=indices, weights=weights, epoch=epoch, length=length)
        # A row that only fills the batch has no weight, and no slot that is used.
        batch["masked_used"] = batch["masked_weights"] > 0
        batch["row_weights"] = np.asarray(weights, np.float32)
        tokens = (batch["attention_mask"] * batch["row_weights"][:, None]).sum()
        share = batch["masked_weights"].sum() / max(tokens, 1.0)
        batch["hidden_share"] = np.full(len(weights), share, np.float32)
        return batch


# Models.


@dataclass(frozen=True)
class Pair:
    """Both models, as one that is trained and saved."""

    discriminator: FlaxElectraForPreTraining
    generator: FlaxElectraForMaskedLM

    @property
    def config(self):
        """The discriminator's."""
        return self.discriminator.config

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of both; the embeddings are the discriminator's."""
        return {"discriminator": self.discriminator.params, "generator": without_embeddings(self.generator.params)}

    @property
    def models(self) -> dict[str, Any]:
        """Both, by the names of their parameters."""
        return {"discriminator": self.discriminator, "generator": self.generator}

    @property
    def params_shape_tree(self) -> dict[str, Any]:
        """Shapes of the parameters of both."""
        generator = without_embeddings(self.generator.params_shape_tree)
        return {"discriminator": self.discriminator.params_shape_tree, "generator": generator}

    def param_shardings(self, mesh: Mesh) -> dict[str, Any]:
        """Return by path where each parameter lies on `mesh`."""
        every = [(name, model.param_shardings(mesh)) for name, model in self.models.items()]
        found = {f"{name}/{path}": sharding for name, paths in every for path, sharding in paths.items()}
        return {path: found[path] for path in flatten(self.params_shape_tree)}

    def hand_over(self) -> dict[str, Any]:
        """Return the parameters of both, which keep none."""
        generator = without_embeddings(self.generator.hand_over())
        return {"discriminator": self.discriminator.hand_over(), "generator": generator}

    def filled_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return by path the shapes of parameters with a vocabulary, without padding."""
        each = [(name, model.filled_shapes()) for name, model in self.models.items()]
        return {f"{name}/{path}": shape for name, shapes in each for path, shape in shapes.items()}

    def decay_mask(self) -> dict[str, Any]:
        """Which of them decay."""
        masks = self.discriminator.decay_mask(), self.generator.decay_mask()
        return {"discriminator": masks[0], "generator": without_embeddings(masks[1])}

    def matrices(self) -> dict[str, Any]:
        """Which of them are kernels inside layers."""
        masks = self.discriminator.matrices(), self.generator.matrices()
        return {"discriminator": masks[0], "generator": without_embeddings(masks[1])}

    def save_pretrained(self, folder: Path, params: dict[str, Any]) -> None:
        """Save the discriminator, and the generator in a folder inside."""
        self.generator.save_pretrained(folder / GENERATOR_FOLDER, join(params))
        self.discriminator.save_pretrained(folder, params["discriminator"])


def load_pair(flags: ElectraFlags, tokenizer) -> Pair:
    """Return models that fit each other and the tokenizer."""
    if flags.discriminator_weight <= 0:
        raise UsageError(f"--discriminator_weight is {flags.discriminator_weight}: it must be above 0.")
    config = recipe.load_config(flags, tokenizer, flags.hub_token)
    if config.model_type != "electra":
        raise UsageError(
            f"The model is of type '{config.model_type}': 'distaff train electra' needs an electra config."
        )
    recipe.check_vocabulary(tokenizer, config)
    options: dict[str, Any] = {"seed": flags.seed, "token": flags.hub_token}
    discriminator = recipe.load_model(FlaxAutoModelForPreTraining, flags, config, **options)
    folder = _saved_generator(flags)
    small = generator_config(flags, discriminator.config, folder)
    theirs = copy.copy(flags)
    theirs.model_name_or_path = folder
    # A seed of its own: two models of one shape would start as the same one.
    generator = recipe.load_model(FlaxAutoModelForMaskedLM, theirs, small, seed=flags.seed + 1, token=flags.hub_token)
    return Pair(discriminator, generator)


def _saved_generator(flags: ElectraFlags) -> str | None:
    """Return the folder of the generator that was saved with the checkpoint, if there is one."""
    if flags.model_name_or_path is None:
        return None
    where = resolve(flags.model_name_or_path, weights=False, token=flags.hub_token, revision=flags.model_revision)
    folder = where / GENERATOR_FOLDER
    if (folder / "config.json").is_file():
        return str(folder)
    logger.warning("'%s' has no %s/: the generator starts anew.", flags.model_name_or_path, GENERATOR_FOLDER)
    return None


def generator_config(flags: ElectraFlags, config, folder: str | None):
    """Return the generator's config: that of its folder, the one that the flags name, or a smaller discriminator."""
    if folder is not None or flags.generator_config_name is not None:
        name = folder or str(resolve(str(flags.generator_config_name), weights=False, token=flags.hub_token))
        small = AutoConfig.from_pretrained(name)
        for each in ("model_type", *_SHARED):
            theirs, ours = getattr(small, each, None), getattr(config, each)
            if theirs != ours:
                raise UsageError(
                    f"The generator's config '{name}' has {each}={theirs} and the discriminator's {ours}: make them "
                    "equal, because both share one set of embeddings."
                )
        return small
    if not 0 < flags.generator_size <= 1:
        raise UsageError(f"--generator_size is {flags.generator_size}: it must be above 0 and at most 1.")
    small = copy.deepcopy(config)
    head = config.hidden_size // config.num_attention_heads
    small.num_attention_heads = max(1, round(config.num_attention_heads * flags.generator_size))
    small.hidden_size = head * small.num_attention_heads
    small.intermediate_size = max(1, round(config.intermediate_size * flags.generator_size))
    return small


# Wiring.


def electra_rows(flags: ElectraFlags, tokenizer, pair: Pair) -> Rows:
    """Return how texts become rows of `--max_seq_length` tokens, some of them masked for the generator."""
    length, weight = recipe.row_length(flags, tokenizer, pair.discriminator.longest_input), flags.discriminator_weight
    return Rows(
        block=length,
        collate=masking(flags, tokenizer, length, ElectraCollate),
        loss_fn=partial(electra_loss, pair.generator.module, pair.discriminator.module, weight),
        tokens="attention_mask",
        derived=partial(total, weight),
    )


RECIPE = text.TextRecipe(name="electra", task=None, model=load_pair, rows=electra_rows, data=make_data)
plan = partial(text.plan, RECIPE)
train = partial(text.train, RECIPE)
evaluate_only = partial(text.evaluate_only, RECIPE)
