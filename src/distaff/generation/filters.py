"""What sampling leaves of a distribution: temperature, top-k, top-p, min-p, typical, epsilon and eta cutoffs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Values = dict[str, Any]

# In the order of Transformers; "temperature" and "top_k" come before all of them.
NAMES = ("top_p", "min_p", "typical", "epsilon", "eta")


def candidates(
    scores: jax.Array, values: Values, *, names: tuple[str, ...], top_k: int, keep: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return scores `[rows, count]` of the tokens that may be drawn, and their ids `[rows, count]`.

    The ids are None where `count` is the vocabulary. What is filtered out is -inf; at least `keep` tokens are left.
    With `top_k` the other filters look at that many scores and not at the vocabulary.
    """
    if "temperature" in names:
        scores = scores / values["temperature"]
    ids = None
    if top_k:
        scores, ids = lax.top_k(scores, min(max(top_k, keep), scores.shape[-1]))
    for name in NAMES:
        if name in names:
            scores = _FILTERS[name](scores, values[name], keep)
    return scores, ids


def spread(scores: jax.Array, ids: jax.Array | None, vocab: int) -> jax.Array:
    """Return candidates as scores `[rows, vocab]`, -inf elsewhere."""
    if ids is None:
        return scores
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.full((ids.shape[0], vocab), -jnp.inf, scores.dtype).at[rows, ids].set(scores)


def _falling(scores: jax.Array) -> jax.Array:
    return -jnp.sort(-scores, axis=-1)


def _at_least(scores: jax.Array, threshold: jax.Array, keep: int) -> jax.Array:
    """Return the scores from `threshold` `[rows, 1]` on, or the best `keep` if those are more."""
    floor = lax.top_k(scores, min(keep, scores.shape[-1]))[0][:, -1:]
    return jnp.where(scores >= jnp.minimum(threshold, floor), scores, -jnp.inf)


def _top_p(scores: jax.Array, mass: jax.Array, keep: int) -> jax.Array:
    """Holtzman et al. 2020: the smallest set of the likeliest tokens that has at least `mass`."""
    ordered = _falling(scores)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    count = jnp.maximum((before < mass).sum(axis=-1, keepdims=True), 1)
    return _at_least(scores, jnp.take_along_axis(ordered, count - 1, axis=-1), keep)


def _min_p(scores: jax.Array, share: jax.Array, keep: int) -> jax.Array:
    """Tokens that are at least `share` as likely as the likeliest."""
    return _at_least(scores, scores.max(axis=-1, keepdims=True) + jnp.log(share), keep)


def _typical(scores: jax.Array, mass: jax.Array, keep: int) -> jax.Array:
    """Meister et al. 2023: the tokens whose surprise is closest to the entropy, until they have `mass`."""
    logs = jax.nn.log_softmax(scores, axis=-1)
    probabilities = jnp.exp(logs)
    entropy = -jnp.where(probabilities > 0, logs * probabilities, 0.0).sum(axis=-1, keepdims=True)
    distance = jnp.abs(-logs - entropy)
    order = jnp.argsort(distance, axis=-1)
    reached = jnp.cumsum(jnp.take_along_axis(probabilities, order, axis=-1), axis=-1)
    count = jnp.minimum((reached < mass).sum(axis=-1, keepdims=True), scores.shape[-1] - 1)
    count = jnp.maximum(count, keep - 1)
    farthest = jnp.take_along_axis(jnp.take_along_axis(distance, order, axis=-1), count, axis=-1)
    return jnp.where(distance <= farthest, scores, -jnp.inf)


def _epsilon(scores: jax.Array, least: jax.Array, keep: int) -> jax.Array:
    """Tokens of at least that probability."""
    return _at_least(scores, jnp.log(least) + jax.nn.logsumexp(scores, axis=-1, keepdims=True), keep)


def _eta(scores: jax.Array, epsilon: jax.Array, keep: int) -> jax.Array:
    """Hewitt et al. 2022: a least probability that falls with the entropy."""
    logs = jax.nn.log_softmax(scores, axis=-1)
    entropy = -jnp.where(jnp.isfinite(logs), logs * jnp.exp(logs), 0.0).sum(axis=-1, keepdims=True)
    least = jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-entropy))
    return _epsilon(scores, least, keep)


_FILTERS = {"top_p": _top_p, "min_p": _min_p, "typical": _typical, "epsilon": _epsilon, "eta": _eta}
