"""Images as rows of patches (Dosovitskiy et al. 2021)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

# Of the cubic that PyTorch's bicubic interpolation fits (Keys 1981 takes -0.5).
_CUBIC = -0.75


class PatchEmbedding(nn.Module):
    """A dense layer on each patch of `patch_size` (height, width); pixels that fill no patch are left out."""

    features: int
    patch_size: tuple[int, int]
    initializer_range: float
    use_bias: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        """Return `[batch, patches, embed]`, row by row, for `pixel_values` `[batch, channels, height, width]`."""
        batch, channels, height, width = pixel_values.shape
        tall, wide = self.patch_size
        rows, columns = height // tall, width // wide
        init = nn.initializers.normal(self.initializer_range)
        kernel = self.param("kernel", init, (tall, wide, channels, self.features), self.param_dtype)
        # A product of matrices: the same as a convolution whose stride is its window.
        pixels = pixel_values[:, :, : rows * tall, : columns * wide].astype(self.dtype)
        pixels = pixels.reshape(batch, channels, rows, tall, columns, wide).transpose(0, 2, 4, 1, 3, 5)
        flat = kernel.astype(self.dtype).transpose(2, 0, 1, 3).reshape(-1, self.features)
        patches = pixels.reshape(batch, rows * columns, -1) @ flat
        if not self.use_bias:
            return patches
        bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)
        return patches + bias.astype(self.dtype)[None, None]


def resized_positions(table: jax.Array, old: tuple[int, int], new: tuple[int, int]) -> jax.Array:
    """Return `[rows * columns, embed]` for the grid `new` from `table` of the grid `old`, by bicubic interpolation.

    As `torch.nn.functional.interpolate(mode="bicubic", align_corners=False)`: nothing is smoothed where it shrinks.
    """
    if old == new:
        return table
    rows, columns = (jnp.asarray(_cubic_weights(*sizes), jnp.float32) for sizes in zip(old, new))
    grid = table.astype(jnp.float32).reshape(*old, -1)  # [rows, columns, embed]
    return jnp.einsum("hi,wj,ijd->hwd", rows, columns, grid).reshape(new[0] * new[1], -1).astype(table.dtype)


def _cubic_weights(old: int, new: int) -> np.ndarray:
    """Return `[new, old]`: what each old place contributes to a new one, between four neighbours."""
    # Centres of pixels lie at halves; beyond the edge stands the pixel at the edge.
    places = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(places).astype(int)
    weights = np.zeros((new, old))
    for offset in (-1, 0, 1, 2):
        distance = np.abs(places - (first + offset))
        neighbour = np.clip(first + offset, 0, old - 1)
        np.add.at(weights, (np.arange(new), neighbour), _cubic(distance))
    return weights


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Return the weight of a neighbour at a distance from 0 to 2."""
    near = (_CUBIC + 2) * distance**3 - (_CUBIC + 3) * distance**2 + 1
    far = _CUBIC * (distance**3 - 5 * distance**2 + 8 * distance - 4)
    return np.where(distance <= 1, near, far)
