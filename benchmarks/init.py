"""Random initialisation of the 6-layer RoBERTa: by rows (ours), or by running the module's own `init` under jit."""

import argparse

import jax
import jax.numpy as jnp
from transformers import RobertaConfig

from distaff import FlaxRobertaForMaskedLM
from workloads import MLM, emit, peak_mb, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=["ours", "plain"], default="ours")
    flags = parser.parse_args()
    config = RobertaConfig(**MLM)
    jax.devices()

    def ours() -> None:
        jax.block_until_ready(FlaxRobertaForMaskedLM(config).params)

    def plain() -> None:
        module = FlaxRobertaForMaskedLM.module_class(config)
        jax.block_until_ready(jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 1), jnp.int32)))

    emit(
        variant=flags.variant, init_s=round(timed(ours if flags.variant == "ours" else plain), 3), peak_rss_mb=peak_mb()
    )


if __name__ == "__main__":
    main()
