"""A step of T5's pretraining through the recipe's loss and the real training step.

`--variant ours` is what `distaff train t5-mlm` runs; `plain` holds all logits and does not donate its state.
"""

from functools import partial

import optax
from transformers import T5Config

from distaff import FlaxT5ForConditionalGeneration
from distaff.tasks._denoise import denoise_loss
from steps import measure, parse
from workloads import T5, t5_batches


def plain_loss(module, params, batch, rng):
    """The loss on logits `[batch, targets, vocab]`."""
    inputs = (batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids"))
    logits = module.apply({"params": params}, *inputs, deterministic=False, rngs={"dropout": rng}).logits
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return {"loss": (losses.sum(), float(losses.size))}


def main() -> None:
    flags = parse(__doc__)
    model = FlaxT5ForConditionalGeneration(T5Config(**T5), dtype=flags.dtype)
    loss = plain_loss if flags.variant == "plain" else denoise_loss
    measure(model, partial(loss, model.module), t5_batches(), flags)


if __name__ == "__main__":
    main()
