"""Embedding tables, and positions that are counted from the tokens."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.mesh import constrain


class Embedding(nn.Embed):
    """A lookup table whose features are whole while it is read; `entries` is the logical axis of its entries."""

    entries: str | None = None

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return `[..., features]` for whole numbers `ids` `[...]`."""
        return jnp.take(constrain(jnp.asarray(self.embedding, self.dtype), self.entries, None), ids, axis=0)


def embedding(
    num_embeddings: int,
    features: int,
    *,
    initializer_range: float,
    dtype,
    param_dtype,
    name: str | None = None,
    entries: str | None = None,
) -> nn.Embed:
    """Return a lookup table `[num_embeddings, features]`; `entries` is "vocab" for that of words."""
    return Embedding(
        num_embeddings,
        features,
        embedding_init=nn.initializers.normal(initializer_range),
        dtype=dtype,
        param_dtype=param_dtype,
        name=name,
        entries=entries,
    )


def positions_after_padding(input_ids: jax.Array, pad_token_id: int) -> jax.Array:
    """Return `[batch, length]` positions that count real tokens from `pad_token_id + 1`; padding keeps `pad_token_id`.

    The positions of fairseq's RoBERTa, whose table has a row for the padding.
    """
    real = (input_ids != pad_token_id).astype(jnp.int32)
    return jnp.cumsum(real, axis=1) * real + pad_token_id
