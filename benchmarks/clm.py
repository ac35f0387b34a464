"""A causal LM step through the recipe's loss and the real training step.

`--variant ours` is what `distaff train clm` runs; `plain` holds all logits and does not donate its state.
"""

from functools import partial

import optax
from transformers import GPT2Config

from distaff import FlaxGPT2LMHeadModel
from distaff.tasks.clm import clm_loss
from steps import measure, parse
from workloads import CLM, clm_batches


def plain_loss(module, params, batch, rng):
    """The loss on logits `[batch, length, vocab]`."""
    logits = module.apply({"params": params}, batch["input_ids"], deterministic=False, rngs={"dropout": rng}).logits
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["input_ids"][:, 1:])
    return {"loss": (losses.sum(), float(losses.size))}


def main() -> None:
    flags = parse(__doc__)
    model = FlaxGPT2LMHeadModel(GPT2Config(**CLM), dtype=flags.dtype)
    loss = plain_loss if flags.variant == "plain" else clm_loss
    measure(model, partial(loss, model.module), clm_batches(), flags)


if __name__ == "__main__":
    main()
