"""Heads that several families put on their hidden states."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.nn.act import ACTIVATIONS
from distaff.nn.norm import layer_norm


def gather_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Return `[batch, count, embed]`: the rows of `hidden` `[batch, length, embed]` at `positions` `[batch, count]`."""
    return jnp.take_along_axis(hidden, positions[..., None], axis=1)


class LMHead(nn.Module):
    """Transform, norm and projection to the vocabulary (Devlin et al. 2019), tied to the embeddings or not."""

    vocab_size: int
    activation: str
    norm_eps: float
    initializer_range: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, tied_embedding: jax.Array | None) -> jax.Array:
        """Return logits `[..., vocab]` for `hidden` `[..., embed]`; `tied_embedding` is `[vocab, embed]` or None."""
        init = nn.initializers.normal(self.initializer_range)
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        hidden = nn.Dense(hidden.shape[-1], kernel_init=init, **dtypes, name="dense")(hidden)
        hidden = layer_norm(eps=self.norm_eps, **dtypes, name="norm")(ACTIVATIONS[self.activation](hidden))
        bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,), self.param_dtype).astype(self.dtype)
        if tied_embedding is None:
            decoder = nn.Dense(self.vocab_size, use_bias=False, kernel_init=init, **dtypes, name="decoder")
            logits = decoder(hidden)
        else:
            logits = jnp.einsum("...d,vd->...v", hidden, tied_embedding.astype(self.dtype))
        return logits + bias.reshape((1,) * (logits.ndim - 1) + bias.shape)


class Pooler(nn.Module):
    """A dense layer with tanh on the first token (Devlin et al. 2019)."""

    initializer_range: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Return `[batch, embed]` for `hidden` `[batch, length, embed]`."""
        dense = nn.Dense(
            hidden.shape[-1],
            kernel_init=nn.initializers.normal(self.initializer_range),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name="dense",
        )
        return jnp.tanh(dense(hidden[:, 0]))
