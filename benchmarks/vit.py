"""A step of image classification through the real training step.

`--variant plain` convolves the patches, as PyTorch does, and does not donate its state.
"""

from functools import partial

import jax
import optax
from flax import linen as nn
from transformers import ViTConfig

from distaff import FlaxViTForImageClassification
from distaff.models import vit
from distaff.nn.patches import PatchEmbedding
from steps import measure, parse
from workloads import VIT, vit_batches


class ConvolvedPatches(PatchEmbedding):
    """The same parameters in a convolution."""

    @nn.compact
    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        """Return `[batch, patches, embed]`."""
        images = pixel_values.transpose(0, 2, 3, 1)
        size = self.patch_size
        conv = nn.Conv(self.features, size, strides=size, padding="VALID", dtype=self.dtype)
        nn.share_scope(self, conv)
        patches = conv(images)
        return patches.reshape(len(patches), -1, self.features)


def image_loss(module, params, batch, rng):
    """The cross-entropy of the classes."""
    pixels = batch["pixel_values"]
    logits = module.apply({"params": params}, pixels, deterministic=False, rngs={"dropout": rng}).logits
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return {"loss": (losses.sum(), float(losses.size))}


def main() -> None:
    flags = parse(__doc__)
    if flags.variant == "plain":
        vit.PatchEmbedding = ConvolvedPatches
    model = FlaxViTForImageClassification(ViTConfig(**VIT), dtype=flags.dtype)
    measure(model, partial(image_loss, model.module), vit_batches(), flags)


if __name__ == "__main__":
    main()
