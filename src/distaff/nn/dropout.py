"""Dropout that keeps little for the backward pass."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

# The name of what is dear to compute again, for a policy of `jax.checkpoint` that keeps it.
KEPT = "kept"


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014): entries are zero with probability `rate`, the others grow by `1 / (1 - rate)`.

    As Flax's, it draws from the stream "dropout" and takes `deterministic` at its construction or at its call. What it
    keeps for the backward pass is one float32 an entry, where Flax's leaves XLA with the 8 bytes of random bits.
    """

    rate: float
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, values: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Return the same shape and dtype."""
        if nn.merge_param("deterministic", self.deterministic, deterministic) or self.rate == 0.0:
            return values
        keep = 1.0 - self.rate
        if keep == 0.0:
            return jnp.zeros_like(values)
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, values.shape)
        # XLA computes cheap operations again wherever they are read, from the random bits; a root it computes once.
        factor = jnp.sqrt(jnp.where(kept, jnp.float32(keep**-2), jnp.float32(0.0)))
        return values * checkpoint_name(factor, KEPT).astype(values.dtype)
