"""Heads that several families put on their hidden states."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.mesh import constrain
from distaff.nn.act import ACTIVATIONS
from distaff.nn.norm import LayerNorm
from distaff.nn.vocabulary import Projection


def gather_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Return `[batch, count, embed]`: the rows of `hidden` `[batch, length, embed]` at `positions` `[batch, count]`."""
    return constrain(jnp.take_along_axis(hidden, positions[..., None], axis=1), "batch", None, None)


def first_token(hidden: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """Return what of `hidden` `[batch, length, embed]` stands for a whole text: `[batch, embed]`.

    Packed rows hold several texts, which start at `positions` `[batch, texts]`: then `[batch, texts, embed]`.
    """
    if positions is not None:
        return gather_positions(hidden, positions)
    return constrain(hidden[:, 0], "batch", None)


class Decoder(nn.Module):
    """The weights of a projection to the vocabulary that is not tied to the embeddings."""

    vocab_size: int
    features: int
    initializer_range: float
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return `[vocab, embed]`."""
        init = nn.initializers.normal(self.initializer_range)
        return self.param("kernel", init, (self.features, self.vocab_size), self.param_dtype).T


class LMHead(nn.Module):
    """Transform, norm and projection to the vocabulary (Devlin et al. 2019), tied to the embeddings or not.

    features: width after the transform, by default that of the hidden states. rows: of the weights, where they are
    padded beyond the vocabulary.
    """

    vocab_size: int
    activation: str
    norm_eps: float
    initializer_range: float
    features: int | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    rows: int | None = None

    @nn.compact
    def __call__(self, hidden: jax.Array, tied_embedding: jax.Array | None) -> Projection:
        """Return the logits to be of `hidden` `[..., embed]`; `tied_embedding` is `[vocab, embed]` or None."""
        init = nn.initializers.normal(self.initializer_range)
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        hidden = nn.Dense(self.features or hidden.shape[-1], kernel_init=init, **dtypes, name="dense")(hidden)
        hidden = LayerNorm(eps=self.norm_eps, **dtypes, name="norm")(ACTIVATIONS[self.activation](hidden))
        rows = self.rows or self.vocab_size
        bias = self.param("bias", nn.initializers.zeros, (rows,), self.param_dtype)
        table = tied_embedding
        if table is None:
            fields = (rows, hidden.shape[-1], self.initializer_range, self.param_dtype)
            table = Decoder(*fields, name="decoder")()
        return Projection(hidden, table, bias, self.vocab_size)


class Pooler(nn.Module):
    """A dense layer with tanh on the first token (Devlin et al. 2019)."""

    initializer_range: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Return `[batch, embed]` for `hidden` `[batch, length, embed]`; `positions` as in `first_token`."""
        dense = nn.Dense(
            hidden.shape[-1],
            kernel_init=nn.initializers.normal(self.initializer_range),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name="dense",
        )
        return jnp.tanh(dense(first_token(hidden, positions)))
