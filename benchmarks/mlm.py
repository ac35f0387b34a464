"""A masked LM step through the recipe's loss and the real training step.

`--variant ours` is what `distaff train mlm` runs; `plain` computes logits everywhere and does not donate its state.
"""

from functools import partial

from transformers import RobertaConfig

from distaff import FlaxRobertaForMaskedLM
from distaff.tasks.mlm import mlm_loss
from steps import measure, parse
from workloads import MLM, mlm_batches


def main() -> None:
    flags = parse(__doc__)
    model = FlaxRobertaForMaskedLM(RobertaConfig(**MLM), dtype=flags.dtype)
    measure(model, partial(mlm_loss, model.module), mlm_batches(everywhere=flags.variant == "plain"), flags)


if __name__ == "__main__":
    main()
