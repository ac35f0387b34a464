"""Losses of classes and numbers for texts, a text a row or several packed in one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from distaff.core.tree import Tree

# What a model takes beside ids and mask, where a batch has it.
_FURTHER_INPUTS = ("token_type_ids", "position_ids", "first_tokens")


def logits_of(model: Any, params: Tree, batch: Mapping[str, jax.Array], rng: jax.Array | None) -> jax.Array:
    """Return `[batch, labels]` float32, for packed rows `[batch, texts, labels]`."""
    given = {name: batch[name] for name in _FURTHER_INPUTS if name in batch}
    segments = batch.get("segments")
    outputs = model(
        batch["input_ids"],
        batch["attention_mask"] if segments is None else segments[:, :, None] == segments[:, None, :],
        **given,
        params=params,
        dropout_rng=rng,
        train=rng is not None,
    )
    return outputs.logits.astype(jnp.float32)


def count_tokens(batch: Mapping[str, np.ndarray]) -> int:
    """Return the tokens that are not padding."""
    return int(np.count_nonzero(batch["segments"] if "segments" in batch else batch["attention_mask"]))


def classification_loss(
    model: Any,
    class_weights: tuple[float, ...] | None,
    label_smoothing: float,
    params: Tree,
    batch: Mapping[str, jax.Array],
    rng: jax.Array | None,
) -> dict[str, tuple[Any, Any]]:
    """Sum the cross-entropy over rows, each weighed by the weight of its class.

    With label smoothing s a row costs (1 - s) log p(label) + s mean(log p(any class)), with its sign turned.
    """
    logits = logits_of(model, params, batch, rng)
    wanted = jax.nn.one_hot(batch["targets"], logits.shape[-1])
    losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(wanted, label_smoothing))
    weights = batch["weights"]
    if class_weights is not None:
        weights = weights * jnp.asarray(class_weights, jnp.float32)[batch["targets"]]
    hits = (logits.argmax(-1) == batch["targets"]) * batch["weights"]
    return {"loss": (jnp.sum(losses * weights), jnp.sum(weights)), "accuracy": (hits.sum(), batch["weights"].sum())}


def regression_loss(
    model: Any, params: Tree, batch: Mapping[str, jax.Array], rng: jax.Array | None
) -> dict[str, tuple[Any, Any]]:
    """Sum the squared error over rows."""
    errors = logits_of(model, params, batch, rng)[..., 0] - batch["targets"]
    return {"loss": (jnp.sum(errors**2 * batch["weights"]), jnp.sum(batch["weights"]))}
